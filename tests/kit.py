"""What the tests share: real processes, real sockets, loopback only."""
import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import socketserver
import subprocess
import sys
import threading
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLEAN = {name: value for name, value in os.environ.items()
         if name.upper() in ("PATH", "SYSTEMROOT", "TEMP", "TMP", "HOME")}
CLEAN["SSL_CERT_FILE"] = os.devnull  # a new Python reads it for any URL
BUSY = threading.Semaphore(3)  # more at once take more CPU in all
EVENTS = (  # what a test tells its result
    "startTest", "addSuccess", "addError", "addFailure", "addSkip",
    "addSubTest", "addExpectedFailure", "addUnexpectedSuccess",
    "addDuration", "stopTest")


@contextlib.contextmanager
def shop(script=ROOT / "stub_shop.py", port=0, **env):
    """Run a shop; yield its port, process and first line of stderr."""
    process = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
        env=dict(CLEAN, HOST="127.0.0.1", PORT=str(port), **env))
    line = process.stderr.readline()
    found = re.search(r":(\d+), traces", line)
    process.port = int(found.group(1)) if found else None
    process.line = line
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def run(script, *args, cwd=None, timeout=60, **env):
    """Run a script of the kit to its end; return what it did."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, args)], cwd=cwd,
        env=dict(CLEAN, **env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout,
        encoding="utf-8", errors="replace")


def ask(port, method, path, body=None, key=None, **headers):
    """Send one request; return status, JSON (or bytes) and headers."""
    if key is not None:
        headers["Idempotency-Key"] = key
    if isinstance(body, (dict, list)):
        body = json.dumps(body)
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        link.request(method, path, body, headers)
        answer = link.getresponse()
        raw = answer.read()
    finally:
        link.close()
    try:
        return answer.status, json.loads(raw), answer.headers
    except ValueError:
        return answer.status, raw, answer.headers


@contextlib.contextmanager
def serve(talk):
    """Serve each connection with talk(socket, number); yield a server
    with .port and .count, the connections so far."""
    class Talk(socketserver.BaseRequestHandler):
        def handle(self):
            with server.lock:
                server.count += 1
                number = server.count
            with contextlib.suppress(OSError):
                talk(self.request, number)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Talk)
    server.lock, server.count = threading.Lock(), 0
    server.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.05,),
                     daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def read_request(link):
    """Return (first line, headers, body) of the request on a socket."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = link.recv(65536)
        if not part:
            raise OSError("no request")
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, value
               in (line.split(":", 1) for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += link.recv(65536)
    return first, headers, body


def answer(link, status, body=b"", **headers):
    """Send one HTTP answer on a socket; a dict goes as JSON."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} X", "Connection: close"]
    if "Content_Length" not in headers:
        head.append(f"Content-Length: {len(body)}")
    head += [f"{name.replace('_', '-')}: {value}"
             for name, value in headers.items()]
    link.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)


class Beside(unittest.TestSuite):
    """The tests of a module; the first to run starts all that wait.

    Three modules at once: the last two wait more than they work."""
    waiting, lock = [], threading.Lock()
    pool = concurrent.futures.ThreadPoolExecutor(3)

    def run(self, result, debug=False):
        while self.waiting:
            suite = self.waiting.pop(0)
            suite.done = self.pool.submit(suite.work, result)
        try:
            self.done.result()
        except KeyboardInterrupt:
            result.stop()
            raise
        return result

    def work(self, result):
        """Run the tests; say all of each when it has ended."""
        own, said = unittest.TestResult(), []

        def say(name, *args):
            said.append((name, args))
            if name == "stopTest":
                say_all()

        def say_all():
            with self.lock:
                for name, args in said:
                    getattr(result, name)(*args)
                said.clear()
                if result.shouldStop:
                    own.stop()

        for name in EVENTS:
            setattr(own, name, functools.partial(say, name))
        super().run(own)
        say_all()


def beside(loader, tests, pattern):
    """Be a load_tests: run a module beside others; not in pytest."""
    Beside.waiting.append(Beside(tests))
    return Beside.waiting[-1]
