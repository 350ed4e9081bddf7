#!/usr/bin/env python3
"""How fast the kit is, as ratios within one run; no pass, no fail.

    python3 tests/bench.py

Each figure is the middle one of several rounds that alternate with what
it is compared to, and the least of them. It takes about a minute.
"""
import contextlib
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import kit

PLAIN = '''
import http.server, json
ORDERS = {}
class Plain(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        size = int(self.headers["Content-Length"])
        order = json.loads(self.rfile.read(size))
        ORDERS[self.headers["Idempotency-Key"]] = order
        body = json.dumps({"ok": True, "order_id": len(ORDERS)}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
import sys
http.server.HTTPServer.request_queue_size = 64  # 16 clients, no SYN lost
server = http.server.HTTPServer(("127.0.0.1", 0), Plain)
print("plain: http://127.0.0.1:%d, traces" % server.server_port,
      file=sys.stderr, flush=True)
server.serve_forever()
'''
ORDER = b'{"sku": "sku_light", "qty": 2}'


def request(key):
    return (b"POST /orders HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n"
            b"Idempotency-Key: %s\r\n\r\n%s" % (len(ORDER), key, ORDER))


def read_answer(link):
    """Read one answer; Content-Length says how long it is."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = link.recv(65536)
        if not part:
            raise OSError("the server hung up")
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    size = int(re.search(rb"Content-Length: (\d+)", head)[1])
    while len(body) < size:
        body += link.recv(65536)


def client(port, count, name, keep=True, times=None):
    """Place orders one after the other, on one connection if keep."""
    link = None
    for number in range(count):
        start = time.perf_counter()
        link = link or socket.create_connection(("127.0.0.1", port), 20)
        link.sendall(request(b"%s-%d" % (name, number)))
        read_answer(link)
        if not keep:
            link.close()
            link = None
        if times is not None:
            times.append(time.perf_counter() - start)
    if link:
        link.close()


def rate(port, clients, count, keep=True):
    """Return orders per second of some clients at once."""
    run = os.urandom(4).hex().encode()
    threads = [threading.Thread(target=client, args=(
        port, count // clients, b"%s-%d" % (run, each), keep))
        for each in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count / (time.perf_counter() - start)


def wall(args, cwd=None, env=None):
    """Return the wall and the CPU seconds of a command."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(args, cwd=cwd, env=env, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=False)
    spent, after = time.perf_counter() - start, os.times()
    return spent, (after.children_user + after.children_system
                   - before.children_user - before.children_system)


def show(what, ours, theirs, to_reach):
    """Print a ratio of middles, and of the best round."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    print(f"{what:46} {statistics.median(ratios):6.2f}"
          f" {min(ratios):6.2f}   {to_reach}", flush=True)


def bench_rate(shop_port, plain_port):
    for clients in 1, 16:
        ours, theirs = [], []
        for _ in range(5):
            ours.append(rate(shop_port, clients, 1600))
            theirs.append(rate(plain_port, clients, 800, keep=False))
        show(f"orders a second, {clients} clients, JOURNAL, to plain",
             ours, theirs, "0.8 or more")


def bench_start():
    ours, theirs = [], []
    for _ in range(9):
        start = time.perf_counter()
        with kit.shop() as shop:
            kit.ask(shop.port, "GET", "/")
            ours.append(time.perf_counter() - start)
        theirs.append(wall([sys.executable, "-c",
                            "import http.server, json, uuid"])[0])
    show("start until the first answer, to the imports", ours, theirs,
         "1.5 or less")


def memory(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


def bench_memory():
    if not pathlib.Path("/proc/self/status").exists():
        print("memory per trace: only where there is a /proc")
        return
    with kit.shop() as shop:
        client(shop.port, 100, b"warm")
        before = memory(shop)
        client(shop.port, 20000, b"memory")
        each = (memory(shop) - before) / 20000 / 1000
    print(f"{'memory per trace, kB':46} {each:6.2f}          1.2 or less")


def bench_stalled(port):
    ours, theirs = [], []
    for _ in range(3):
        alone, beside = [], []
        name = os.urandom(4).hex().encode()
        client(port, 600, name + b"a", times=alone)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(
                    ("127.0.0.1", port), 20)).sendall(b"POST /ord")
            client(port, 600, name + b"b", times=beside)
        ours.append(statistics.quantiles(beside, n=100)[98])
        theirs.append(statistics.quantiles(alone, n=100)[98])
    show("99th percentile beside 200 stalled, to alone", ours, theirs,
         "2 or less")


def bench_grade(folder):
    with kit.shop() as shop:
        rows = []
        call = {"function": {"name": "create_order",
                             "arguments": ORDER.decode()}}
        rows.append({"method": "POST", "url": "http://x/chat/completions",
                     "req": {}, "status": 200, "resp": {"choices": [
                         {"message": {"tool_calls": [call]}}]}})
        status, resp, headers = kit.ask(
            shop.port, "POST", "/orders", json.loads(ORDER), key="bench")
        rows.append({"trace_id": headers["X-Trace-Id"], "method": "POST",
                     "url": f"http://127.0.0.1:{shop.port}/orders",
                     "key": "bench", "req": json.loads(ORDER),
                     "status": status, "resp": resp})
        path = pathlib.Path(folder, "replay.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ours, theirs = [], []
        for _ in range(9):
            ours.append(wall([sys.executable, kit.ROOT / "grade.py", path,
                              f"http://127.0.0.1:{shop.port}"])[1])
            theirs.append(wall([
                sys.executable, "-c",
                "import urllib.request, json, argparse"])[1])
    show("grade.py, CPU time, to urllib's imports", ours, theirs, "2 or less")


def bench_gate(folder):
    python = [sys.executable, "-m", "pytest"]
    if subprocess.run(python + ["--version"], stdout=subprocess.DEVNULL,
                      stderr=subprocess.DEVNULL, check=False).returncode:
        print("gate.py red: pytest is not installed")
        return
    source = kit.ROOT / "invoices"
    copy = pathlib.Path(folder, "invoices")
    copy.mkdir()
    for file in source.glob("*.*"):
        (copy / file.name).write_bytes(file.read_bytes())
    ours, theirs = [], []
    for _ in range(5):
        ours.append(wall([sys.executable, kit.ROOT / "gate.py", "red"],
                         cwd=folder)[0])
        theirs.append(wall(python + [copy], cwd=folder)[0])
    show("gate.py red, wall time, to bare pytest", ours, theirs,
         "1.3 or less")


def main():
    print(f"{'':46} middle  least   to reach")
    with tempfile.TemporaryDirectory() as folder:
        plain = pathlib.Path(folder, "plain.py")
        plain.write_text(PLAIN)
        with kit.shop(JOURNAL=f"{folder}/journal") as shop, \
                kit.shop(plain) as other:
            bench_rate(shop.port, other.port)
            bench_stalled(shop.port)
        bench_start()
        bench_memory()
        bench_grade(folder)
        bench_gate(folder)


if __name__ == "__main__":
    main()
