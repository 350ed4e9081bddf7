"""The grader from outside: what it answers, and that nothing hurts it.

    FUZZ=2000 python3 -m unittest discover -s tests -p test_grade.py

bends 2,000 files and answers; FUZZ_SEED picks others; SLOW=1 adds
servers that take a minute.
"""
import concurrent.futures
import contextlib
import copy
import functools
import gzip
import json
import os
import pathlib
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import urllib.parse

import kit

load_tests = kit.beside
FUZZ = int(os.environ.get("FUZZ", 80))
FUZZ_SEED = int(os.environ.get("FUZZ_SEED", 1))
SLOW = os.environ.get("SLOW")
THREADS = 3  # a run waits a little for the shop
FIELDS = ("method", "path", "key", "req", "status", "resp", "order_id",
          "body")
MIB = 1 << 20
ORDER = {"sku": "sku_light", "qty": 2}
REAL = types.SimpleNamespace()  # what setUpModule starts
STATUS = pathlib.Path("/proc/self/status")
METER = f"""if True:
    import atexit, runpy, sys
    atexit.register(lambda: print(open("{STATUS}").read().partition(
        "VmHWM:")[2].split()[0], "KiB at most", file=sys.stderr))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")"""


def setUpModule():
    """Start a shop, let the harness order; start the slow runs."""
    with contextlib.ExitStack() as stack:
        REAL.folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory()))
        REAL.shop = stack.enter_context(kit.shop())
        REAL.url = f"http://127.0.0.1:{REAL.shop.port}"
        model = stack.enter_context(
            kit.shop(kit.ROOT / "tests" / "scripted_model.py"))
        replay = REAL.folder / "harness.jsonl"
        harness = kit.run(
            "harness.py", STUB_URL=REAL.url, MODEL_NAME="scripted",
            MODEL_BASE_URL=re.search(r"http://\S+", model.line).group(),
            REPLAY=str(replay))
        if harness.returncode:
            raise OSError(harness.stderr)
        REAL.short = replay.read_bytes()
        REAL.rows = [json.loads(line)
                     for line in REAL.short.splitlines()]
        key = REAL.rows[1]["key"]
        REAL.rows += [post(REAL.shop.port, key, req) for req in (
            ORDER, {"sku": "sku_light", "qty": 3},
            {"sku": "sku_light"})]
        REAL.long = lines(REAL.rows)
        start_slow_runs(stack)
        REAL.stack = stack.pop_all()


def tearDownModule():
    REAL.stack.close()


# ----------------------------------------------------------------------
# Take-homes

def post(port, key, req, prefix=""):
    """Post an order as a harness does; return the row of it."""
    headers = {"Content-Type": "application/json"}
    status, resp, headers = kit.ask(port, "POST", prefix + "/orders", req,
                                    key, **headers)
    return {"trace_id": headers.get("X-Trace-Id"),
            "at": "2026-11-29T20:03:03Z", "method": "POST",
            "url": f"http://127.0.0.1:{port}{prefix}/orders", "key": key,
            "req": req, "status": status, "resp": resp}


def call(arguments, name="create_order"):
    """Return a tool call of a model."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {"id": "call_1", "type": "function",
            "function": {"name": name, "arguments": arguments}}


def chat(*calls, words=None):
    """Return the row of a hop to a model."""
    message = {"role": "assistant", "content": words}
    if calls:
        message["tool_calls"] = list(calls)
    return {"trace_id": None, "at": "2026-11-29T20:03:02Z",
            "method": "POST", "url": "http://m.example/v1/chat/completions",
            "key": None, "req": {"model": "any", "messages": []},
            "status": 200, "resp": {"choices": [{"message": message}]}}


def record(port, prefix="", key="idem_recorded"):
    """Return the rows of an order, a replay and a conflict."""
    other = {"sku": "sku_light", "qty": 3}
    return [chat(call(ORDER)), post(port, key, ORDER, prefix),
            post(port, key, ORDER, prefix), post(port, key, other, prefix),
            chat(words="Done.")]


def lines(rows):
    """Return rows as the bytes of a file; bytes stay as they are."""
    return b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode())
        + b"\n" for row in rows)


def bent(*bends):
    """Return the long honest file after some bends of its rows."""
    rows = copy.deepcopy(REAL.rows)
    for bend in bends:
        rows = bend(rows) or rows
    return lines(rows)


def put(number, **members):
    """Change members of a row; None where a member goes away is GONE."""
    return lambda rows: rows[number - 1].update(members)


def drop(name, *numbers):
    """Take a member out of rows."""
    def bend(rows):
        for number in numbers:
            del rows[number - 1][name]
    return bend


def only(*numbers):
    """Keep some rows, in the order given."""
    return lambda rows: [rows[number - 1] for number in numbers]


def deep(number, *path, to):
    """Change a value somewhere inside a row."""
    def bend(rows):
        place = rows[number - 1]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to
    return bend


def message(number, **members):
    """Change members of a model's message."""
    return lambda rows: rows[number - 1]["resp"]["choices"][0][
        "message"].update(members)


def insert(number, row):
    """Put a row before another; the row may be made from the rows."""
    return lambda rows: rows.insert(
        number - 1, row(rows) if callable(row) else row)


def swap(old, new):
    """Replace a text everywhere in the rows."""
    return lambda rows: json.loads(json.dumps(rows).replace(old, new))


def order_id(rows):
    return rows[1]["resp"]["order_id"]


# ----------------------------------------------------------------------
# Runs

class Run:
    """One run of the grader, and what it printed, taken apart."""

    def __init__(self, process, took):
        self.code, self.took = process.returncode, took
        self.raw, self.err = process.stdout, process.stderr.decode()
        peak = re.search(r"(\d+) KiB at most\n\Z", self.err)
        self.peak = peak and int(peak.group(1))  # KiB
        self.err = self.err[:peak.start()] if peak else self.err
        self.out = self.raw.decode("latin-1")
        self.lines = self.out.split("\n")
        self.answers = [found.groups() for found in (
            re.match(r"(tool call|idempotency|wire) +(yes|no|\?) +(\S.*)",
                     line) for line in self.lines) if found]
        self.words = " ".join(word for _, word, _ in self.answers)
        self.brief = "\n".join(line[:200] for line in self.lines[:60])
        self.why = {name: why for name, _, why in self.answers}
        self.samples = []  # (row number, curl, file, shop, end)
        for at, line in enumerate(self.lines):
            found = re.match(r"row (\d+) +(curl .*)", line)
            if found:
                self.samples.append((
                    int(found.group(1)), found.group(2),
                    *(part.strip() for part in self.lines[at + 1:at + 4])))

    def drawn(self):
        return [sample[0] for sample in self.samples]


def grade(file, url=None, *args, meter=False, timeout=100,
          busy=kit.BUSY, **env):
    """Run the grader on a file (bytes: as a file of its own)."""
    command = [str(kit.ROOT / "grade.py")]
    if meter and STATUS.exists():
        command[:0] = "-c", METER
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(file, bytes):
            path = pathlib.Path(folder) / "replay.jsonl"
            path.write_bytes(file)
            file = path
        with busy:
            began = time.monotonic()
            process = subprocess.run(
                [sys.executable, *command, str(file), url or REAL.url,
                 *map(str, args)],
                env=dict(kit.CLEAN, **env), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                timeout=timeout,
                # So Python 3.8 starts it without a copy of itself.
                close_fds=os.name == "nt")
            return Run(process, time.monotonic() - began)


def together(function, items):
    """Yield (item, result) of many runs, a few at a time."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        yield from zip(items, pool.map(function, items))


class GraderCase(unittest.TestCase):
    def check_output(self, run, rows=2):
        """What holds for every run, whatever the file or the shop."""
        shown = run.raw[:3000], run.err[-3000:]
        self.assertEqual(run.err, "", shown)
        self.assertRegex(run.raw, rb"\A[ -~\n]*\n\Z", shown)
        self.assertLess(len(run.raw), 2500 + 5500 * rows, shown)
        self.assertLess(max(map(len, run.lines)), 2500, shown)
        self.assertEqual([name for name, _, _ in run.answers],
                         ["tool call", "idempotency", "wire"], shown)
        code = 1 if "no" in run.words else 3 if "?" in run.words else 0
        verdict = {0: "complete", 1: "incomplete", 3: "not gradable"}[code]
        self.assertEqual(run.code, code, shown)
        self.assertEqual(run.lines[-2:], [f"verdict: {verdict}", ""], shown)
        self.assertEqual(run.out.count("verdict:"), 1, shown)
        self.assertLess(run.took, 60)
        if run.peak:
            self.assertLess(run.peak, 256 * 1024, shown)

    def check_words(self, run, words):
        """Compare the answers; a dot stands for no or ?."""
        pattern = re.escape(words).replace(r"\.", r"(no|\?)")
        self.assertRegex(run.words, rf"\A{pattern.replace('any', '.+')}\Z",
                         run.brief)

    def check_table(self, table, *args):
        """Run (sentence, words, file[, differing names]) with all rows."""
        args = args or ("--rows", 50)
        for case, run in together(
                lambda case: grade(case[2], None, *args), table):
            with self.subTest(case[0]):
                self.check_output(run, rows=50)
                self.check_words(run, case[1])
                for name in case[3:]:
                    self.assertIn(name, run.out, run.brief)


# ----------------------------------------------------------------------
# A candidate's shop

class Candidate:
    """A shop that a candidate might have written; options cheat."""

    def __init__(self, prefix="", replay=200, conflict=409, lookup=200,
                 always_new=False, tell=dict, header="X-Trace-Id",
                 bend=None, trace_status=200, lies=None):
        self.bend = bend  # of the bytes of every answer
        self.trace_status = trace_status
        self.lies = lies or {}  # status in the trace -> status sent
        self.prefix, self.header, self.tell = prefix, header, tell
        self.replay, self.conflict = replay, conflict
        self.lookup, self.always_new = lookup, always_new
        self.keys, self.traces = {}, {}
        self.count = self.posts = 0
        self.recorded = 0  # traces there were before the grader came
        self.forgets = False
        self.asked = []  # first line of each request
        self.lock = threading.Lock()

    def place(self, key, req):
        """Return the status and the answer to an order."""
        self.count += 1
        order = f"ord_{self.count:012x}"
        first, placed = self.keys.setdefault(key, (req, order))
        if placed == order or self.always_new:
            return 201, {"ok": True, "order_id": order}
        if canon(first) == canon(req):
            return self.replay, {"ok": True, "order_id": placed}
        if self.conflict == 409:
            return 409, {"error": "idempotency conflict"}
        return self.conflict, {"ok": True, "order_id": placed}

    def post(self, link, key, raw):
        req = json.loads(raw)
        status, resp = self.place(key, req)
        self.posts += 1
        resp["trace_id"] = trace_id = f"t{self.posts:032x}"
        if not self.forgets:
            self.traces[trace_id] = {
                "trace_id": trace_id, "method": "POST",
                "path": self.prefix + "/orders", "key": key, "req": req,
                "status": status, "resp": resp}
        kit.answer(link, self.lies.get(status, status), resp,
                   **{self.header: trace_id})

    def talk(self, link, number):
        first, headers, raw = kit.read_request(link)
        if self.bend:
            link = Link(link, self.bend)
        method, path, _ = first.split(" ")
        with self.lock:
            self.asked.append(first)
            if path.startswith(self.prefix + "/_trace/"):
                self.serve_trace(link, path.rpartition("/")[2])
            elif method == "POST" and path == self.prefix + "/orders":
                self.post(link, headers.get("idempotency-key"), raw)
            elif path.startswith(self.prefix + "/orders/"):
                kit.answer(link, self.lookup, {})
            else:
                kit.answer(link, 404, {"error": "not found"})

    def serve_trace(self, link, name):
        if name not in self.traces:
            return kit.answer(link, 404, {"error": "not found"})
        trace = self.tell(copy.deepcopy(self.traces[name]))
        return kit.answer(link, self.trace_status, trace)


class Link:
    """A socket whose answers are bent on their way out."""

    def __init__(self, link, bend):
        self.recv, self.send, self.bend = link.recv, link.sendall, bend

    def sendall(self, data):
        self.send(self.bend(data))


def canon(value):
    return json.dumps(value, sort_keys=True)


def article(trace):
    """The trace of the public article: body for req, no resp."""
    return {"path": trace["path"], "key": trace["key"],
            "body": trace["req"], "status": trace["status"],
            "order_id": trace["resp"].get("order_id")}


def without(*names):
    return lambda trace: {name: value for name, value in trace.items()
                          if name not in names}


def with_(**members):
    return lambda trace: dict(trace, **members)


class ProbeAttack(Candidate):
    """Turns on whoever asks for anything, or for a recorded trace."""

    def __init__(self, attack, everywhere=False):
        super().__init__()
        self.attack, self.everywhere = attack, everywhere
        self.armed, self.hit = False, []

    def talk(self, link, number):
        if not self.armed:
            return super().talk(link, number)
        first = link.recv(65536, socket.MSG_PEEK).split(b"\r\n")[0].decode()
        name = first.split(" ")[1].rpartition("/")[2]
        if self.everywhere or name in self.recorded:
            self.hit.append(first)
            link.recv(65536)
            return self.attack(link)
        return super().talk(link, number)


def besiege(attack, everywhere=False, meter=True, busy=kit.BUSY):
    """Grade an honest file against a shop that attacks the grader."""
    shop = ProbeAttack(attack, everywhere)
    with kit.serve(shop.talk) as server:
        rows = record(server.port)
        shop.recorded, shop.armed = set(shop.traces), True
        shop.asked.clear()
        run = grade(lines(rows), f"http://127.0.0.1:{server.port}",
                    meter=meter, busy=busy)
    run.hit = shop.hit
    return run


# ----------------------------------------------------------------------
# What a hostile server may do

def raw(*parts):
    """Send bytes as they are and hang up."""
    def attack(link):
        for part in parts:
            link.sendall(part)
    return attack


def body(data, status=200, **headers):
    return lambda link: kit.answer(link, status, data, **headers)


def trace_with(**members):
    """Answer a full trace with something odd in it."""
    trace = {"method": "POST", "path": "/orders", "key": "idem_recorded",
             "req": ORDER, "status": 201, "resp": {}}
    return body(dict(trace, **members))


def hang(link):
    """Say nothing until the grader hangs up."""
    while link.recv(4096):
        pass


def drip(link):
    """Send a byte of a header now and then, for ever."""
    link.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        link.sendall(b"x")
        time.sleep(0.5)


def drip_body(link):
    """Send a byte of the body now and then, for ever."""
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{")
    while True:
        link.sendall(b" ")
        time.sleep(0.5)


def continue_forever(link):
    while True:
        link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.001)


def endless(link):
    """Promise 16 GiB and send what is taken."""
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 17179869184\r\n\r\n")
    while True:
        link.sendall(b"[" * 65536)


def endless_chunks(link):
    link.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        link.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def endless_head(link):
    link.sendall(b"HTTP/1.1 200 ")
    while True:
        link.sendall(b"x" * 65536)


def almost_late(link):
    """Answer each question with a second to spare, but not at once."""
    time.sleep(19)
    kit.answer(link, 404, {})


LIMIT = """if True:  # prints how deep this Python's JSON goes
    import json
    low, high = 0, 60_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            json.dumps(json.loads("[" * middle + "]" * middle))
            low = middle
        except RecursionError:
            high = middle
    print(low)"""
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x7f\r\n\x08\x85\u202e\u2028\ud800"
ATTACKS = (  # sentence, what answers the recorded traces, wire's word
    ("is an SSH server", raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "?"),
    ("hangs up", raw(), "?"),
    ("hangs up after the status", raw(b"HTTP/1.1 200 OK\r\n"), "."),
    ("sends zeros", raw(b"\0" * 100), "?"),
    ("sends 300 headers", body({}, **{f"X-{n}": n for n in range(300)}),
     "."),
    ("sends a header of 100,000 characters", body({}, X="x" * 100_000),
     "."),
    ("sends a header of escape sequences",
     body({}, X_Trace_Id="\x1b[2J\x7f"), "no"),
    ("sends header lines without a colon",
     raw(b"HTTP/1.1 200 OK\r\n\x1b[31m\r\n: \r\n\r\n{}"), "."),
    ("answers with status 099", raw(b"HTTP/1.1 099 X\r\n\r\n"), "."),
    ("answers with a status of letters", raw(b"HTTP/1.1 abc\r\n\r\n"),
     "."),
    ("answers 999", body({}, 999), "no"),
    ("answers 101 and another protocol",
     raw(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n\1\2\3"), "."),
    ("answers 204", raw(b"HTTP/1.1 204 No\r\n\r\n"), "no"),
    ("asks for a password", body({}, 401, WWW_Authenticate="Basic x=1"),
     "no"),
    ("wants a proxy's password",
     body({}, 407, Proxy_Authenticate="Digest nonce=\"a"), "no"),
    ("cuts its answer", raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n"
                            b"\r\n{\"key\": 1"), "?"),
    ("cuts a chunk", raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: "
                         b"chunked\r\n\r\nff\r\n{}"), "?"),
    ("sends chunks that are none",
     raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
     "."),
    ("sends a chunk of a negative size",
     raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx"),
     "."),
    ("sends a chunk of 10**30 bytes",
     raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
         + b"f" * 25 + b"\r\n{}"), "."),
    ("promises 10**30 bytes",
     body(b"{}", Content_Length="1" + "0" * 30), "."),
    ("promises a length of 5,000 digits",
     body(b"{}", Content_Length="1" * 5000), "."),
    ("promises fewer than none", body(b"{}", Content_Length="-5"), "."),
    ("names two lengths", raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
                              b"Content-Length: 9\r\n\r\n{}"), "."),
    ("sends 16 GiB", endless, "?"),
    ("sends 1 MiB and a byte", body(b"{}".ljust(MIB + 1)), "?"),
    ("sends chunks without end", endless_chunks, "no"),
    ("sends a status line without end", endless_head, "."),
    ("sends gzip", body(gzip.compress(b"{}"), Content_Encoding="gzip"),
     "no"),
    ("sends nothing", body(b""), "no"),
    ("sends HTML", body(b"<html>\x1b[31m</html>"), "no"),
    ("sends bytes that are not UTF-8", body(b"{\"key\": \"\xff\"}"), "no"),
    ("sends a NaN", body(b'{"key": NaN, "req": 1, "status": 201}'), "no"),
    ("sends 1e999", body(b'{"key": 1e999, "req": 1, "status": 201}'),
     "no"),
    ("sends a list", body(b"[]"), "no"),
    ("sends a number", body(b"7"), "no"),
    ("sends null", body(b"null"), "no"),
    ("sends a member twice",
     body(b'{"key": 1, "key": 1, "req": 1, "status": 1}'), "no"),
    ("nests 50,000 arrays", body(b"[" * 50_000 + b"]" * 50_000), "no"),
    ("nests 50,000 objects",
     body(b'{"key":' * 50_000 + b"1" + b"}" * 50_000), "no"),
    ("opens a million arrays", body(b"[" * MIB), "no"),
    ("sends a 6,000-digit number",
     body(b'{"key": %s, "req": 1, "status": 1}' % (b"9" * 6000)), "no"),
    ("sends a 4,000-digit number", trace_with(status=10 ** 4000), "no"),
    ("sends 300,000 small lists",
     body(b'{"key": 1, "status": 1, "req": [%s]}' % b",".join(
         [b"[]"] * 300_000)), "no"),
    ("sends 60,000 members", trace_with(resp={
        str(n): n for n in range(60_000)}), "no"),
    ("sends 900 kB in one value", trace_with(key="x" * 900_000), "no"),
    ("sends 900 kB in one name", trace_with(resp={"x" * 900_000: 1}),
     "no"),
    ("sends 150 kB of DEL", trace_with(resp="\x7f" * 150_000), "no"),
    ("sends escape sequences in every value", trace_with(**{
        name: ESCAPES for name in ("method", "path", "key", "req",
                                   "status", "resp")}), "no"),
    ("sends escape sequences in names", trace_with(resp={ESCAPES: 1}),
     "no"),
    ("sends escape sequences in an error",
     body({"error": ESCAPES}, 400), "no"),
    ("sends escape sequences as a reason",
     raw(b"HTTP/1.1 500 \x1b[2J\x7f\r\n\r\n"), "?"),
    ("sends lone surrogates",
     body(b'{"key": "\\ud800", "req": "\\udfff", "status": 201}'), "no"),
    ("sends a byte-order mark", body(b"\xef\xbb\xbf{}"), "no"),
    ("names numbers where texts belong", trace_with(
        method=1, path=2, key=3, req=4, status="5", resp=6), "no"),
    ("names lists where texts belong", trace_with(
        method=[], path=["/orders"], key={}, req=[], status=[], resp=[]),
     "no"),
    ("answers 500", body({}, 500), "?"),
    ("answers 503 in HTML", body(b"<html>", 503), "?"),
    ("answers 429", body({}, 429, Retry_After="99999"), "?"),
    ("answers 404", body({}, 404), "?"),
    ("answers 403", body({}, 403), "no"),
)
SLOW_ATTACKS = (  # these take all the time that the grader has
    ("hangs", hang), ("drips a header", drip), ("drips a body", drip_body),
    ("says 100 Continue for ever", continue_forever))


def start_slow_runs(stack):
    """Let the runs that wait for 20 seconds wait beside the others."""
    cases = [(f"{name}, {where}", attack, everywhere)
             for name, attack in SLOW_ATTACKS
             for where, everywhere in (("the traces", False),
                                       ("everywhere", True))]
    if SLOW:
        cases += [("answers after 19 s", almost_late, False),
                  ("answers after 19 s, everywhere", almost_late, True)]
    pool = concurrent.futures.ThreadPoolExecutor(len(cases))
    stack.callback(pool.shutdown)
    REAL.slow = [(name, everywhere, pool.submit(
        besiege, attack, everywhere, busy=contextlib.nullcontext()))
                 for name, attack, everywhere in cases]


# ----------------------------------------------------------------------
# The tests

class TakeHomes(GraderCase):
    def test_an_honest_take_home_is_complete(self):
        port = REAL.shop.port
        lost = post(port, "idem_lost", ORDER)
        lost.update(trace_id=None, status=None, resp=None, error="timeout")
        broken = chat(call('{"sku": "sku_light", "qty": '))
        two = {"sku": "sku_heavy", "qty": 1}
        reverse = [dict(reversed(list(row.items()))) for row in REAL.rows]
        self.check_table([
            ("as the harness wrote it", "yes yes yes", REAL.short),
            ("with a replay, a 409 and a 400", "yes yes yes", REAL.long),
            ("an answer was lost, then the replay", "yes yes yes", lines([
                chat(call(ORDER)), lost, post(port, "idem_lost", ORDER),
                chat(words="Done.")])),
            ("the first call had broken arguments", "yes yes yes",
             bent(insert(1, broken))),
            ("the first call had another name", "yes yes yes",
             bent(insert(1, chat(call(ORDER, "order"))))),
            ("two calls at once, two orders", "yes yes yes", lines([
                chat(call(ORDER), call(two)),
                post(port, "idem_a", ORDER), post(port, "idem_b", two)])),
            ("the same asked twice, two orders", "yes yes yes", lines([
                chat(call(ORDER)), post(port, "idem_c", ORDER),
                chat(call(ORDER)), post(port, "idem_d", ORDER)])),
            ("arguments as an object", "yes yes yes",
             bent(deep(1, "resp", "choices", 0, "message", "tool_calls", 0,
                       "function", "arguments", to=ORDER))),
            ("arguments with spaces, members turned round", "yes yes yes",
             bent(message(1, tool_calls=[
                 call(' {"qty":\n2, "sku":"sku_light"} ')]))),
            ("members in another order", "yes yes yes", lines(reverse)),
            ("rows of other hops in between", "yes yes yes", bent(
                insert(1, dict(chat(), url="http://m.example/models")),
                insert(3, dict(chat(), method="GET",
                               url=f"{REAL.url}/orders", req=None)))),
            ("a model that failed first", "yes yes yes", bent(
                insert(1, dict(chat(), status=500, resp="<html>")),
                insert(1, dict(chat(), status=None, resp=None)),
                insert(1, dict(chat(), resp={"choices": []})),
                insert(1, dict(chat(), resp={"choices": None})),
                insert(1, dict(chat(), resp=[])))),
            ("the model's message is odd", "yes yes yes", bent(*(
                insert(1, dict(chat(), resp={"choices": [
                    {"message": odd}]})) for odd in (
                        None, 5, "x", [], {}, {"tool_calls": 5},
                        {"tool_calls": {"function": 1}},
                        {"tool_calls": [None, 5, [], {}, {"function": 5}]},
                        {"tool_calls": [call("[" * 9999)]},
                        {"tool_calls": [call("NaN"), call("1" * 5000)]})))),
            ("the last words are parts", "yes yes yes",
             bent(message(3, content=[{"type": "text", "text": "Done."}]))),
            ("the last words name the order", "yes yes yes",
             bent(lambda rows: message(3, content=order_id(rows))(rows))),
            ("a question after the URL", "yes yes yes",
             bent(put(1, url="http://m.example/chat/completions?v=1"),
                  put(2, url=f"{REAL.url}/orders?x=/y#z"))),
            ("a 503 and a lost answer without a trace", "yes yes yes",
             bent(insert(2, lambda rows: dict(
                 rows[1], status=503, trace_id=None, resp="<html>")))),
            ("members that the contract does not name", "yes yes yes",
             bent(put(2, line="x", shop=False, path="/", order=None,
                      done=False, note=[1]))),
            ("members by the name of the grader's own, everywhere",
             "yes yes yes", bent(*(put(number, line=number, path=5, shop=5,
                                       order=5, done=5)
                                   for number in range(1, 7)))),
        ])

    def test_the_tool_call_says_no(self):
        port = REAL.shop.port
        args = functools.partial(deep, 1, "resp", "choices", 0, "message",
                                 "tool_calls", 0, "function", "arguments")
        more = insert(3, lambda rows: post(port, os.urandom(8).hex(), ORDER))
        text = json.dumps(call(ORDER))
        table = [
            ("only shop rows", bent(only(2, 4, 5, 6))),
            ("only the 201", bent(only(2))),
            ("the model only talks", bent(
                message(1, tool_calls=None, content=text))),
            ("the call is a text", bent(message(1, tool_calls=[text]))),
            ("the call comes after the order", bent(only(2, 1, 3, 4))),
            ("another quantity was asked for", bent(
                args(to='{"sku": "sku_light", "qty": 3}'))),
            ("the quantity is a float", bent(
                args(to='{"sku": "sku_light", "qty": 2.0}'))),
            ("the quantity is a text", bent(
                args(to='{"sku": "sku_light", "qty": "2"}'))),
            ("another sku was asked for", bent(
                args(to='{"sku": "sku_dark", "qty": 2}'))),
            ("a member more was asked for", bent(
                args(to='{"sku": "sku_light", "qty": 2, "x": 1}'))),
            ("arguments cut off", bent(args(to='{"sku": "sku_light", '))),
            ("arguments encoded twice", bent(
                args(to=json.dumps(json.dumps(ORDER))))),
            ("two objects as arguments", bent(
                args(to=json.dumps(ORDER) * 2))),
            ("the call has another name", bent(
                message(1, tool_calls=[call(ORDER, "create_orders")]))),
            ("the call is in the request only", bent(
                message(1, tool_calls=[]),
                put(1, req={"choices": REAL.rows[0]["resp"]["choices"]}))),
            ("the call is in the second choice", bent(
                lambda rows: rows[0]["resp"]["choices"].insert(
                    0, {"message": {"content": "No."}}))),
            ("one call for two orders", bent(more)),
            ("the words name an order that is none", bent(
                message(3, content="Done: ord_nothing."))),
            ("the words name the order and one more", bent(
                lambda rows: message(3, content=order_id(rows)
                                     + " ord_0123456789ab")(rows))),
            ("the order's name with a tail", bent(
                lambda rows: message(3, content=order_id(rows)
                                     + "-2")(rows))),
            ("a part of the words names an order that is none", bent(
                message(3, content=[{"type": "text", "text": "ord_x"}]))),
            ("no order was placed", bent(only(1, 3, 6))),
        ]
        self.check_table([(name, "no yes yes", file)
                          for name, file in table])

    def test_an_order_named_after_a_conflict_alone_was_never_returned(self):
        fake = deep(5, "resp", "order_id", to="ord_conflict")
        self.check_table([("the words name it", "no yes no", bent(
            fake, message(3, content="ord_conflict")))])

    def test_idempotency_says_no_to_the_file(self):
        port = REAL.shop.port
        second = "ord_" + "0" * 32
        table = [
            ("no keys", "yes no any", bent(drop("key", 2, 4, 5, 6))),
            ("one row has no key", "yes no no", bent(drop("key", 6))),
            ("the key is null", "any no no", bent(put(2, key=None))),
            ("the key is empty", "any no no", bent(put(4, key=""))),
            ("the key is a number", "no yes no", bent(put(4, key=5))),
            ("the key is a list", "no yes no", bent(put(4, key=["x"]))),
            ("a row without an answer has no key", "yes no yes", bent(
                insert(2, lambda rows: dict(
                    rows[1], trace_id=None, status=None, resp=None,
                    key=None)))),
            ("one key has two orders", "yes no no",
             bent(deep(4, "resp", "order_id", to=second))),
            ("one key has two orders, both real", "yes no no", lines(
                [chat(call(ORDER)), chat(call(ORDER))]
                + [dict(post(port, key, ORDER), key="idem_one")
                   for key in ("idem_two", "idem_three")])),
        ]
        self.check_table(table)

    def test_the_wire_says_no_to_the_file(self):
        double = b'{"status": 201, ' + json.dumps(REAL.rows[1]).encode()[1:]
        table = [
            ("empty file", "no yes no", b""),
            ("blank lines", "no yes no", b"\n \r\n\t\n"),
            ("a byte-order mark alone", "no yes no", b"\xef\xbb\xbf"),
            ("only the chat", "no yes no", bent(only(1, 3))),
            ("no shop row: other paths", "no yes no",
             bent(only(1, 2, 3), put(2, url=f"{REAL.url}/order"))),
            ("no shop row: another method", "no yes no",
             bent(only(1, 2, 3), put(2, method="PUT"))),
            ("torn last line", "any yes no", REAL.long[:-20], "jsonl:6"),
            ("a line torn in the middle", "any yes no",
             REAL.long.replace(b"\n", b"", 1), "jsonl:1"),
            ("prose", "no yes no", b"I ran it and it worked.\n", "jsonl:1"),
            ("prose after the rows", "yes yes no",
             REAL.long + b"\n\nBest regards\n", "jsonl:9"),
            ("not UTF-8", "yes yes no", REAL.long + b"\xff\xfe\n",
             "jsonl:7"),
            ("UTF-16", "no yes no", REAL.long.decode().encode("utf-16"),
             "jsonl:1"),
            ("a JSON array of rows", "no yes no",
             json.dumps(REAL.rows).encode(), "jsonl:1"),
            ("a pretty file", "no yes no",
             json.dumps(REAL.rows[1], indent=1).encode(), "jsonl:1"),
            ("a number", "yes yes no", REAL.long + b"7\n", "jsonl:7"),
            ("null", "yes yes no", REAL.long + b"null\n", "jsonl:7"),
            ("an empty object", "yes yes no", REAL.long + b"{}\n",
             "jsonl:7"),
            ("a member twice", "any yes no", lines(
                [REAL.rows[0], double, *REAL.rows[2:]]), "jsonl:2"),
            ("a member twice deep inside", "yes yes no",
             REAL.long + b'{"x": [{"y": 1, "y": 1}]}\n', "jsonl:7"),
            ("NaN", "yes yes no", REAL.long + json.dumps(
                dict(REAL.rows[0], req=float("nan"))).encode(), "jsonl:7"),
            ("1e999", "yes yes no", REAL.long + json.dumps(
                dict(REAL.rows[0], req=77)).replace(
                    ": 77", ": -1e999").encode(), "jsonl:7"),
            ("nested 50,000 deep", "yes yes no", REAL.long
             + b"[" * 50_000 + b"]" * 50_000, "jsonl:7"),
            ("a row nested 50,000 deep", "yes yes no", REAL.long
             + json.dumps(dict(REAL.rows[0], req=77)).replace(
                 ": 77", ": " + "[" * 50_000 + "]" * 50_000).encode(),
             "jsonl:7"),
            ("a 6,000-digit number", "yes yes no",
             REAL.long + b"9" * 6000, "jsonl:7"),
            ("two rows on a line", "any yes no",
             REAL.long.replace(b"}\n{", b"} {", 1), "jsonl:1"),
            ("a nul", "yes yes no", REAL.long + b"\0\n", "jsonl:7"),
        ]
        table += [(f"a model row without {name}", "any yes no",
                   bent(drop(name, 3)), "jsonl:3")
                  for name in ("method", "url", "status", "req", "resp")]
        table += [(f"a url that is {value!r}", "yes yes yes",
                   bent(put(3, url=value)))  # neither model nor shop
                  for value in (None, 5, ["http://x/orders"])]
        table += [(f"row {number} has no trace id", "yes yes no",
                   bent(put(number, trace_id=None)), f"row {number}")
                  for number in (2, 4, 5, 6)]
        table += [(f"the trace id is {value!r}", "yes yes no",
                   bent(put(5, trace_id=value)), "row 5")
                  for value in ("", "../orders/x", "a/b", "a b", "a\n",
                                "x" * 65, "\u00e9", "%2e%2e", "a?b", 5,
                                0, True, [], ["a"], {}, 1.5, "\ud800")]
        table += [
            ("no trace ids", "yes yes no", bent(
                *(put(number, trace_id=None) for number in (2, 4, 5, 6)))),
            ("no row has the member trace_id", "yes yes no",
             bent(drop("trace_id", 2, 4, 5, 6))),
            ("one trace id on all rows", "yes yes no", bent(
                *(put(number, trace_id=REAL.rows[1]["trace_id"])
                  for number in (2, 4, 5, 6)))),
            ("a row twice", "yes yes no", bent(only(1, 2, 2, 3)), "row 3"),
            ("a 201 without an order id", "any any no",
             bent(deep(2, "resp", "order_id", to=None)), "row 2"),
            ("a 200 without an order id", "any any no",
             bent(put(4, resp={"ok": True}))),
            ("a 201 with an answer of text", "any any no",
             bent(put(2, resp="created"))),
            ("a 201 with an order id of 5", "any any no",
             bent(deep(2, "resp", "order_id", to=5))),
            ("a row without an answer bears a trace id twice",
             "yes yes no", bent(insert(2, lambda rows: dict(
                 rows[1], status=None, resp=None)))),
        ]
        self.check_table(table)

    def test_an_edited_row_is_found_and_named(self):
        def quantity(value):  # in the call and in the rows
            text = json.dumps(value)
            return lambda rows: json.loads(
                json.dumps(rows).replace('\\"qty\\": 2', f'\\"qty\\": {text}')
                .replace('"qty": 2', f'"qty": {text}'))
        table = [
            ("201 made a 200", bent(put(2, status=200)), {2: "status"}),
            ("200 made a 201", bent(put(4, status=201)), {4: "status"}),
            ("409 made a 400", bent(put(5, status=400)), {5: "status"}),
            ("400 made a 409", bent(put(6, status=409)), {6: "status"}),
            ("409 made a 503", bent(put(5, status=503)), {5: "status"}),
            ("201 made 201.0", bent(put(2, status=201.0)), {2: "status"}),
            ("409 made a text", bent(put(5, status="409")), {5: "status"}),
            ("409 made true", bent(put(5, status=True)), {5: "status"}),
            ("400 made null", bent(put(6, status=None)), {6: "status"}),
            ("quantity, in the call too", bent(quantity(7)),
             {2: "req", 4: "req"}),
            ("quantity 2 made 2.0", bent(quantity(2.0)),
             {2: "req", 4: "req"}),
            ("quantity 2 made true", bent(quantity(True)),
             {2: "req", 4: "req"}),
            ("quantity 2 made a text", bent(
                deep(5, "req", "qty", to="3")), {5: "req"}),
            ("sku, in the call too", bent(swap("sku_light", "sku_dark")),
             {2: "req", 4: "req", 5: "req", 6: "req"}),
            ("a member more in req", bent(deep(6, "req", "qty", to=None)),
             {6: "req"}),
            ("req as a text", bent(put(6, req='{"sku": "sku_light"}')),
             {6: "req"}),
            ("req made null", bent(put(6, req=None)), {6: "req"}),
            ("order id, everywhere", bent(
                lambda rows: swap(order_id(rows), "ord_" + "0" * 32)(rows)),
             {2: "resp", 4: "resp"}),
            ("key, everywhere", bent(
                lambda rows: swap(rows[1]["key"], "idem_mine")(rows)),
             {2: "key", 4: "key", 5: "key", 6: "key"}),
            ("key of one row", bent(put(6, key="idem_mine")), {6: "key"}),
            ("true made 1 in resp", bent(deep(2, "resp", "ok", to=1)),
             {2: "resp"}),
            ("true made 1.0 in resp", bent(deep(2, "resp", "ok", to=1.0)),
             {2: "resp"}),
            ("a member more in resp", bent(deep(2, "resp", "x", to=None)),
             {2: "resp"}),
            ("resp made null", bent(put(5, resp=None)), {5: "resp"}),
            ("resp as a text", bent(put(6, resp="{}")), {6: "resp"}),
            ("two trace ids changed places", bent(
                put(4, trace_id=REAL.rows[4]["trace_id"]),
                put(5, trace_id=REAL.rows[3]["trace_id"])),
             {4: "req resp status", 5: "req resp status"}),
            ("status and key", bent(put(6, key="k", status=409)),
             {6: "key status"}),
        ]
        for (name, file, differ), run in together(
                lambda case: grade(case[1], None, "--rows", 50), table):
            with self.subTest(name):
                self.check_output(run, rows=50)
                self.check_words(run, "yes yes no")
                self.assertEqual(sorted(run.drawn()), [2, 4, 5, 6])
                found = {number: " ".join(sorted(
                    set(re.findall(r"\w+", end)) & set(FIELDS)))
                    for number, *_, end in run.samples if end != "match"}
                self.assertEqual(found, differ)
                named = re.findall(r"\brow (\d+)", run.why["wire"])
                self.assertIn(int(named[0]), differ)

    def test_forms_of_a_file_that_are_fine(self):
        port = REAL.shop.port
        odd = {"sku": "a\u2028b\u2029c\x85\x0b\x0c\x1c\x1dd\x7f\ud7ff",
               "qty": 1}
        typed = post(port, "idem_odd", odd)
        plain = json.dumps(
            [chat(call(odd)), typed], ensure_ascii=False)[1:-1].replace(
                '}, {"trace_id"', '}\n{"trace_id"').encode()
        self.assertEqual(plain.count(b"\n"), 1)
        self.assertIn("\u2028".encode(), plain)
        crlf = REAL.long.replace(b"\n", b"\r\n")
        spaced = REAL.long.replace(b"\n", b"\n \n\n")
        table = [
            ("a byte-order mark", b"\xef\xbb\xbf" + REAL.long),
            ("CRLF", crlf), ("blank lines", spaced),
            ("a byte-order mark, CRLF and blank lines",
             b"\xef\xbb\xbf" + crlf.replace(b"\n", b"\n\r\n")),
            ("a blank first line", b"\r\n" + REAL.long),
            ("no newline at the end", REAL.long[:-1]),
            ("line separators inside a string", plain),
            ("spaces around the rows",
             b"  " + REAL.long.replace(b"\n", b"\t \n  ")),
        ]
        self.check_table([(name, "yes yes yes", file)
                          for name, file in table])

    def test_a_blank_line_after_the_byte_order_mark(self):
        self.check_table([("blank", "yes yes yes",
                           b"\xef\xbb\xbf\r\n" + REAL.long)])

    def test_over_32_mib_is_not_a_weekends_trace(self):
        path = REAL.folder / "big.jsonl"
        for size, words in ((32 * MIB, "yes yes yes"),
                            (32 * MIB + 1, "yes yes no")):
            with self.subTest(size=size):
                path.write_bytes(REAL.long.ljust(size))
                run = grade(path, meter=True)
                self.check_output(run)
                self.check_words(run, words)
        self.assertEqual(run.why["wire"],
                         "over 32 MiB: not a weekend's trace")
        path.write_bytes(REAL.long * (32 * MIB // len(REAL.long) + 1))
        run = grade(path)
        self.check_output(run)
        self.assertEqual(run.why["wire"],
                         "over 32 MiB: not a weekend's trace")
        path.unlink()

    def test_a_file_of_many_short_lines_takes_no_minute(self):
        for line, size, words in (
                (b"\n", 8 * MIB, "yes yes yes"),
                (b"x\n", 31 * MIB, "yes yes no"),
                (b"{}\n", 31 * MIB, "yes yes no")):
            with self.subTest(line):
                data = REAL.long + line * (size // len(line))
                run = grade(data, meter=True, timeout=20)
                self.check_output(run)
                self.check_words(run, words)


class LiveShops(GraderCase):
    def candidates(self, table):
        """Run (sentence, words, options, bend of file and shop)."""
        def run(case):
            shop = Candidate(**case[2])
            with kit.serve(shop.talk) as server:
                rows = record(server.port, shop.prefix)
                for bend in case[3:]:
                    rows = bend(shop, rows) or rows
                url = f"http://127.0.0.1:{server.port}{shop.prefix}"
                shop.asked.clear()
                return shop, grade(lines(rows), url, "--rows", 50)
        for case, (shop, run) in together(run, table):
            with self.subTest(case[0]):
                self.check_output(run, rows=50)
                self.check_words(run, case[1])
                for line in shop.asked:
                    self.assertRegex(line, r"\A(GET /([\w/]*/)?(orders|_trace"
                                     r")/[\w-]{1,64}|POST /([\w/]*/)?orders)"
                                     r" HTTP/1\.1\Z")

    def test_shops_that_are_honest(self):
        def chunked(data):
            head, _, text = data.partition(b"\r\n\r\n")
            head = re.sub(rb"Content-Length: \d+",
                          b"Transfer-Encoding: chunked", head)
            return head + b"\r\n\r\n1\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (
                text[:1], len(text) - 1, text[1:])

        def reversed_(trace):
            return dict(reversed(list(trace.items())))
        self.candidates([
            ("a shop of the candidate's own", "yes yes yes", {}),
            ("traces as in the public article", "yes yes yes",
             {"tell": article}),
            ("traces as in the article, no order id beside a 409",
             "yes yes yes",
             {"tell": lambda trace: {
                 name: value for name, value in article(trace).items()
                 if value is not None}}),
            ("body for req, resp as it is", "yes yes yes",
             {"tell": lambda trace: without("req")(
                 dict(trace, body=trace["req"]))}),
            ("traces without method", "yes yes yes",
             {"tell": without("method")}),
            ("traces with more members", "yes yes yes",
             {"tell": with_(extra={"at": "x"}, took=5)}),
            ("traces turned round", "yes yes yes", {"tell": reversed_}),
            ("traces without their own id", "yes yes yes",
             {"tell": without("trace_id")}),
            ("a shop below a path", "yes yes yes", {"prefix": "/a/b"}),
            ("a shop below a path that a proxy takes off", "yes yes yes",
             {"prefix": "/a/b", "tell": with_(path="/orders")}),
            ("headers in lower case", "yes yes yes",
             {"header": "x-trace-id"}),
            ("answers in chunks", "yes yes yes", {"bend": chunked}),
            ("answers without a length", "yes yes yes", {
                "bend": lambda data: re.sub(rb"Content-Length: \d+\r\n",
                                            b"", data)}),
            ("HTTP/1.0", "yes yes yes", {
                "bend": lambda data: data.replace(b"/1.1", b"/1.0", 1)}),
            ("100 Continue first", "yes yes yes", {
                "bend": lambda data: b"HTTP/1.1 100 C\r\n\r\n" + data}),
            ("answers with spaces around", "yes yes yes", {
                "bend": lambda data: re.sub(
                    rb"(?s)Content-Length: \d+(.*?\r\n\r\n)",
                    rb"X: y\1\r\n \t", data) + b"\n\n"}),
        ])

    def test_shops_that_cheat(self):
        def forget(shop, rows):
            shop.forgets = True

        def known(name):  # only what the file shows is bent
            return lambda trace: dict(
                trace, **{name: "x"} if trace["key"] == "idem_recorded"
                else {})

        def play_back(shop, rows):
            first = shop.traces[rows[1]["trace_id"]]
            shop.post = lambda link, key, raw: kit.answer(
                link, 201, first["resp"], X_Trace_Id=first["trace_id"])

        def play_all_back(shop, rows):
            answers = iter([shop.traces[row["trace_id"]]
                            for row in rows[1:4]])

            def post_(link, key, raw):
                trace = next(answers)
                kit.answer(link, trace["status"], trace["resp"],
                           X_Trace_Id=trace["trace_id"])
            shop.post = post_

        def one_trace(shop, rows):
            """Every probe is answered with the trace of its first."""
            place, seen = shop.place, []

            def post_(link, key, raw):
                status, resp = place(key, json.loads(raw))
                if not seen:
                    seen.append("tprobe")
                    shop.traces["tprobe"] = {
                        "method": "POST", "path": "/orders", "key": key,
                        "req": json.loads(raw), "status": status,
                        "resp": resp}
                kit.answer(link, status, resp, X_Trace_Id="tprobe")
            shop.post = post_

        def another_order(shop, rows):
            place = shop.place

            def place_(key, req):
                status, resp = place(key, req)
                if status == 200:
                    resp["order_id"] = "ord_another"
                return status, resp
            shop.place = place_

        def no_order_id(shop, rows):
            for row in rows[1:3]:
                for side in row, shop.traces[row["trace_id"]]:
                    side["resp"].pop("order_id")

        def answer_with(status, resp, **headers):
            def bend(shop, rows):
                shop.post = lambda link, key, raw: kit.answer(
                    link, status, resp, **headers)
            return bend

        def order_ids(value):
            """Every order of a probe is called so."""
            def bend(shop, rows):
                place = shop.place

                def place_(key, req):
                    status, resp = place(key, req)
                    if "order_id" in resp:
                        resp["order_id"] = value
                    return status, resp
                shop.place = place_
            return bend

        def trace_ids(value):
            def bend(shop, rows):
                def with_header(link, key, raw):
                    status, resp = shop.place(key, json.loads(raw))
                    kit.answer(link, status, resp, **(
                        {} if value is None else {"X-Trace-Id": value}))
                shop.post = with_header
            return bend

        def headless(shop, rows):
            def post(link, key, raw):
                Candidate.post(shop, Link(link, lambda data: re.sub(
                    rb"X-Trace-Id: \w+\r\n", b"", data)), key, raw)

            def serve_trace(link, name):
                last = list(shop.traces)[-1]
                Candidate.serve_trace(
                    shop, link, name if name in shop.traces else last)
            shop.post, shop.serve_trace = post, serve_trace

        table = [
            ("never answers 409", "yes no yes", {"conflict": 200},
             lambda shop, rows: rows[:3]),
            ("makes every POST a new order", "yes no yes",
             {"always_new": True}, lambda shop, rows: rows[:2]),
            ("answers 201 on replay", "yes no yes", {"replay": 201},
             lambda shop, rows: rows[:2]),
            ("answers 422 for a conflict", "yes no yes", {"conflict": 422},
             lambda shop, rows: rows[:3]),
            ("does not trace the grader's own POST", "yes no yes", {},
             forget),
            ("knows no order that it placed", "yes no yes", {"lookup": 404}),
            ("forbids to look an order up", "yes no yes", {"lookup": 403}),
            ("cannot look an order up now", "yes ? yes", {"lookup": 500}),
            ("plays one row back", "yes no yes", {}, play_back),
            ("plays the file back", "yes no yes", {}, play_all_back),
            ("has one trace for three answers", "yes no yes", {},
             one_trace),
            ("names another order on replay", "yes no yes", {},
             another_order),
            ("sends 201 on replay and traces a 200", "yes no yes",
             {"lies": {200: 201}}, lambda shop, rows: rows[:2]),
            ("sends 200 for a conflict and traces a 409", "yes no yes",
             {"lies": {409: 200}}, lambda shop, rows: rows[:3]),
            ("answers 403 and the trace all the same", "yes yes yes",
             {"trace_status": 403}),
            ("answers 503 and the trace all the same", "yes ? ?",
             {"trace_status": 503}),
            ("has an order without an id in file and trace",
             "any any no", {}, no_order_id),
            ("sends no trace id", "yes no yes", {}, trace_ids(None)),
            ("sends no trace id, traces under any name", "yes no yes", {},
             headless),
            ("sends an empty trace id", "yes no yes", {}, trace_ids("")),
            ("sends a path as trace id", "yes no yes", {},
             trace_ids("../orders/x")),
            ("sends escape sequences as trace id", "yes no yes", {},
             trace_ids("\x1b[2J")),
            ("sends a trace id of 65 characters", "yes no yes", {},
             trace_ids("x" * 65)),
            ("order ids that lead elsewhere", "yes no yes", {},
             order_ids("../_trace/x")),
            ("order ids of another host", "yes no yes", {},
             order_ids("//127.0.0.1:9/")),
            ("order ids that are numbers", "yes no yes", {}, order_ids(5)),
            ("order ids that are lists", "yes no yes", {}, order_ids(["x"])),
            ("order ids that are empty", "yes no yes", {}, order_ids("")),
            ("order ids that are null", "yes no yes", {}, order_ids(None)),
            ("one order id for all, 65 characters", "yes no yes", {},
             order_ids("x" * 65)),
            ("answers 200 to a new key", "yes no yes", {},
             answer_with(200, {"ok": True, "order_id": "ord_1"},
                         X_Trace_Id="t1")),
            ("answers 400 to everything", "yes no yes", {},
             answer_with(400, {"error": ESCAPES})),
            ("answers a list", "yes no yes", {},
             answer_with(201, [], X_Trace_Id="t1")),
            ("answers HTML", "yes no yes", {},
             answer_with(201, b"<html>", X_Trace_Id="t1")),
            ("answers 503", "yes ? yes", {}, answer_with(503, b"")),
            ("answers 429", "yes ? yes", {}, answer_with(429, {})),
            ("answers a redirect", "yes ? yes", {},
             answer_with(307, {}, Location="/orders/")),
            ("a restart: empty", "yes yes ?", {},
             lambda shop, rows: shop.traces.clear()),
            ("a restart, and a row that gives itself away", "no yes ?", {},
             lambda shop, rows: shop.traces.clear() or rows[1:]),
            ("one trace is lost", "yes yes ?", {},
             lambda shop, rows: shop.traces.pop(rows[2]["trace_id"]) and None
             ),
            ("one trace is lost, another differs", "yes yes no", {},
             lambda shop, rows: shop.traces.pop(rows[1]["trace_id"])
             and rows[3].update(status=400)),
            ("one trace differs, another is lost", "any yes no", {},
             lambda shop, rows: shop.traces.pop(rows[3]["trace_id"])
             and rows[2].update(key="idem_other")),
            ("traces without key", "yes no no", {"tell": without("key")}),
            ("traces without status", "yes no no",
             {"tell": without("status")}),
            ("traces without req", "yes no no", {"tell": without("req")}),
            ("traces without resp and order id", "yes no no",
             {"tell": without("resp")}),
            ("traces without path", "yes no no", {"tell": without("path")}),
            ("traces of another path", "yes no no",
             {"tell": with_(path="/carts")}),
            ("traces of the end of a path", "yes yes yes",
             {"tell": with_(path="rders")}),
            ("traces of an empty path", "yes no no",
             {"tell": with_(path="")}),
            ("traces of a longer path", "yes no no",
             {"tell": with_(path="/x/orders")}),
            ("traces of another method", "yes no no",
             {"tell": with_(method="PUT")}),
            ("traces that say what is asked: the first", "yes no no",
             {"tell": with_(key="idem_recorded", req=ORDER, status=201)}),
            ("article traces with another order", "yes no no",
             {"tell": lambda trace: dict(article(trace), order_id="ord_x")}),
            ("article traces without the order", "yes no no",
             {"tell": lambda trace: without("order_id")(article(trace))}),
            ("article traces with another body", "yes no no",
             {"tell": lambda trace: dict(article(trace), body={})}),
            ("typed: the trace has 2.0", "yes no no",
             {"tell": lambda trace: dict(trace, req=dict(
                 trace["req"], qty=float(trace["req"]["qty"])))}),
            ("typed: the trace has 1 for true", "yes no no",
             {"tell": lambda trace: dict(trace, resp=dict(
                 trace["resp"], **{"ok": 1} if "ok" in trace["resp"]
                 else {"error": 1}))}),
            ("typed: the trace has 201.0", "yes no no",
             {"tell": lambda trace: dict(
                 trace, status=float(trace["status"]))}),
            ("typed: a status as text", "yes no no",
             {"tell": lambda trace: dict(
                 trace, status=str(trace["status"]))}),
        ]
        table += [(f"recorded traces have another {name}", "yes yes no",
                   {"tell": known(name)})
                  for name in ("method", "path", "key", "req", "status",
                               "resp")]
        self.candidates(table)

    def test_a_difference_weighs_more_than_a_lost_trace(self):
        rows = copy.deepcopy(REAL.rows)
        rows[1]["trace_id"] = rows[3]["trace_id"] = "lost"
        rows[3]["trace_id"] += "_too"
        rows[4]["status"] = 400
        for seed, run in together(
                lambda seed: grade(lines(rows), None, "--rows", 9, "--seed",
                                   seed), range(6)):
            with self.subTest(seed=seed):
                self.check_output(run, rows=4)
                self.check_words(run, "yes yes no")
                self.assertIn("row 5", run.why["wire"])

    def test_the_note_about_another_host(self):
        long = REAL.long.replace(b"127.0.0.1", b"localhost")
        for file, url, noted in (
                (REAL.long, REAL.url, False), (long, REAL.url, True),
                (long, REAL.url.replace("127.0.0.1", "localhost"), False),
                (REAL.long.replace(REAL.url.encode(), b"https://x.example"),
                 REAL.url, True)):
            with self.subTest(url=url, noted=noted):
                run = grade(file, url)
                self.check_output(run)
                self.check_words(run, "yes yes yes")
                self.assertEqual(bool(re.search(
                    r"(?m)^note\b.*recorded", run.out)), noted, run.out)

    def test_a_shop_that_is_down(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d" % taken.getsockname()[1]
            for name, words, file in (
                    ("honest", "yes ? ?", REAL.long),
                    ("forged", "no ? ?", bent(only(2))),
                    ("no keys", "any no ?", bent(drop("key", 2, 4, 5, 6))),
                    ("empty", "no ? no", b"")):
                with self.subTest(name):
                    run = grade(file, url)
                    self.check_output(run)
                    self.check_words(run, words)

    def test_hosts_that_are_none(self):
        for url in ("http://127.0.0.1:99999", "http://127.0.0.1:65536/x",
                    "http://127.0.0.1:0", f"http://{'a' * 70}.invalid",
                    "http://[::1]:1", "http://[:::]", "http://..",
                    "http://127.0.0.1:" + "9" * 5000, "http://-",
                    "http://shop.invalid", "https://127.0.0.1:1",
                    "http://127.0.0.1:http", "http://[",
                    "http://127.0.0.1:" + "9" * 22, "http://a]b",
                    "http://a'b;c"):
            with self.subTest(url[:40]):
                run = grade(REAL.long, url)
                if run.code != 2:  # may be refused as an address
                    self.check_output(run, rows=12)
                    self.check_words(run, "yes ? ?")
                self.assertNotIn("Traceback", run.err)

    def test_https_is_spoken_to_https(self):
        run = grade(REAL.long, REAL.url.replace("http", "https"))
        self.check_output(run)
        self.check_words(run, "yes ? ?")

    def test_a_restarted_shop_is_a_deployment_note(self):
        with kit.shop() as shop:
            rows = record(shop.port)
        with kit.shop(port=shop.port) as shop:
            run = grade(lines(rows), f"http://127.0.0.1:{shop.port}")
        self.check_output(run)
        self.check_words(run, "yes yes ?")
        self.assertEqual(run.code, 3)


class Output(GraderCase):
    def test_it_reads_as_the_contract_says(self):
        run = grade(REAL.long, REAL.url + "/", "--rows", 50, "--seed", 51)
        self.check_output(run, rows=50)
        self.check_words(run, "yes yes yes")
        self.assertEqual(run.why["tool call"], "asked for before row 2")
        self.assertRegex(run.why["wire"], "4 of 4 rows")
        self.assertIn("\nseed 51\n", run.out)
        self.assertIn("an order stays behind", run.why["idempotency"])
        self.assertEqual(sorted(run.drawn()), [2, 4, 5, 6])
        for number, curl, file, shop, end in run.samples:
            row = REAL.rows[number - 1]
            self.assertEqual(shlex.split(curl)[-1],
                             f"{REAL.url}/_trace/{row['trace_id']}")
            trace = kit.ask(REAL.shop.port, "GET",
                            f"/_trace/{row['trace_id']}")[1]
            due = {name: trace[name] for name in (
                "method", "path", "key", "req", "status", "resp")}
            for name, side in (("file", file), ("shop", shop)):
                self.assertEqual(side.split(None, 1)[0], name)
                self.assertEqual(json.loads(side.split(None, 1)[1]), due)
            self.assertEqual(end, "match")

    def test_the_shops_side_is_what_the_shop_said(self):
        shop = Candidate(prefix="/a", tell=with_(path="/orders"))
        with kit.serve(shop.talk) as server:
            rows = record(server.port, "/a")
            run = grade(lines(rows), f"http://127.0.0.1:{server.port}/a")
        self.check_words(run, "yes yes yes")
        for _, _, _, side, end in run.samples:
            said = json.loads(side.split(None, 1)[1])
            self.assertEqual((said["path"], end), ("/orders", "match"))

    def test_two_rows_are_drawn_unless_more_are_asked_for(self):
        for args, count in (((), 2), (("--rows", 1), 1), (("--rows", 3), 3),
                            (("--rows", 4), 4), (("--rows=999",), 4)):
            with self.subTest(args):
                run = grade(REAL.long, None, *args)
                self.check_output(run, rows=4)
                self.assertEqual(len(set(run.drawn())), count)

    def test_of_every_status_one_before_a_second(self):
        port = REAL.shop.port
        rows = [chat(*[call(ORDER)] * 9)] + [
            post(port, f"idem_many{n}", ORDER) for n in range(9)] + [
            post(port, "idem_many0", ORDER),
            post(port, "idem_many0", dict(ORDER, qty=5)),
            post(port, "idem_many0", {})]
        statuses = {number: row["status"]
                    for number, row in enumerate(rows, 1)}

        def run(case):
            return grade(lines(rows), None, "--rows", case[0], "--seed",
                         case[1])
        cases = [(count, seed) for count in (2, 3, 4, 5)
                 for seed in range(4)]
        seen = set()
        for (count, seed), run in together(run, cases):
            with self.subTest(count=count, seed=seed):
                self.check_output(run, rows=5)
                self.check_words(run, "yes yes yes")
                drawn = [statuses[number] for number in run.drawn()]
                self.assertEqual(len(drawn), count)
                self.assertEqual(len(set(drawn[:4])), min(count, 4))
                seen.update(run.drawn())
        self.assertGreater(len(seen), 6, "the draw is not random")

    def test_a_seed_repeats_the_draw(self):
        rows = [chat(*[call(ORDER)] * 12)] + [
            post(REAL.shop.port, f"idem_seed{n}", ORDER) for n in range(12)]
        draws = {}
        for seed in (7, 7, 8, 9, -5):
            run = grade(lines(rows), None, "--rows", 6, "--seed", seed)
            self.check_output(run, rows=6)
            self.assertIn(f"\nseed {seed}\n", run.out)
            draws.setdefault(seed, run.drawn())
            self.assertEqual(run.drawn(), draws[seed])
        self.assertGreater(len(set(map(tuple, draws.values()))), 1)
        first = grade(lines(rows), None, "--rows", 6)
        seed = re.search(r"(?m)^seed (-?\d+)$", first.out).group(1)
        again = grade(lines(rows), None, "--rows", 6, "--seed", seed)
        self.assertEqual(first.drawn(), again.drawn())

    def test_a_draw_without_a_seed_varies(self):
        rows = [chat(*[call(ORDER)] * 30)] + [
            post(REAL.shop.port, f"idem_vary{n}", ORDER) for n in range(30)]
        runs = together(lambda _: grade(lines(rows), None, "--rows", 9),
                        range(3))
        draws = {tuple(run.drawn()) for _, run in runs}
        self.assertGreater(len(draws), 1)

    def test_a_curl_is_quoted_for_the_shell(self):
        shop = Candidate(prefix="/a'b$(touch;`x`)&|*\"<>\\")
        with kit.serve(shop.talk) as server:
            url = f"http://127.0.0.1:{server.port}{shop.prefix}"
            rows = record(server.port, shop.prefix)
            run = grade(lines(rows), url)
        self.check_output(run)
        self.check_words(run, "yes yes yes")
        self.assertEqual(len(run.samples), 2)
        for number, curl, *_ in run.samples:
            self.assertEqual(shlex.split(curl)[-1],
                             f"{url}/_trace/{rows[number - 1]['trace_id']}")
            self.assertEqual(shlex.split(curl)[:-1], ["curl", "-sS"])

    def test_nothing_in_the_file_reaches_the_screen_as_it_is(self):
        long = ESCAPES + "x" * 900_000
        order = {"sku": long, "qty": 1}
        dels = {"sku": "\x7f" * 400, "qty": 1}
        two = REAL.rows[1]
        table = [
            ("a posted order nobody asked for", "no yes no",
             bent(put(2, req=order))),
            ("an order of DEL that nobody asked for", "no yes no",
             bent(put(2, req=dels))),
            ("an order asked for and edited", "yes yes no",
             bent(put(2, req=order), put(4, req=order),
                  message(1, tool_calls=[call(order)] * 2))),
            ("an order of DEL, asked for and edited", "yes yes no",
             bent(put(2, req=dels), put(4, req=dels),
                  message(1, tool_calls=[call(dels)] * 2))),
            ("a key", "yes yes no", bent(
                put(2, key=long), put(4, key=long))),
            ("a key with two orders", "yes no any", bent(
                put(2, key=long), put(4, key=long, resp=dict(
                    two["resp"], order_id="ord_x")))),
            ("a path", "yes yes yes", bent(
                put(2, url=f"http://x/{long}/../orders"))),
            ("a status", "no yes no", bent(put(2, status=long),
                                           put(4, status=[long]))),
            ("an answer", "any any no", bent(put(2, resp=long))),
            ("an order id", "no any no", bent(
                deep(2, "resp", "order_id", to=long),
                deep(4, "resp", "order_id", to=long))),
            ("a trace id", "yes yes no", bent(put(2, trace_id=long))),
            ("the last words", "no yes yes", bent(
                message(3, content=f"ord_{'x' * 900_000} {ESCAPES}"))),
            ("1,000 orders in the last words", "no yes yes", bent(
                message(3, content=" ".join(
                    f"ord_{n}" for n in range(1000))))),
            ("a method and a url", "yes yes yes", bent(
                insert(1, dict(chat(), method=long, url=long)))),
        ]
        for case, run in together(
                lambda case: grade(case[2], None, "--rows", 9), table):
            with self.subTest(case[0]):
                self.check_output(run, rows=4)
                self.check_words(run, case[1])

    def test_a_file_name_cannot_colour_the_terminal(self):
        if os.name == "nt":
            return
        path = REAL.folder / "\x1b[31m\x7f\n.jsonl"
        path.write_bytes(b"x\n")
        run = grade(path)
        self.check_output(run)
        self.check_words(run, "no yes no")
        missing = grade(REAL.folder / "\x1b[31m\x7f\nmissing")
        self.assertRegex(missing.err, r"\A[ -~\n]+\Z")


class Usage(GraderCase):
    def test_bad_arguments_end_with_2(self):
        good = REAL.folder / "good.jsonl"
        good.write_bytes(REAL.short)
        url = REAL.url
        table = [
            ("nothing", []), ("no address", [good]),
            ("three arguments", [good, url, "more"]),
            ("a flag that nobody knows", [good, url, "--speed=2"]),
            ("no rows", [good, url, "--rows", "0"]),
            ("fewer than no rows", [good, url, "--rows", "-1"]),
            ("half a row", [good, url, "--rows", "1.5"]),
            ("rows without a number", [good, url, "--rows"]),
            ("rows of 5,000 digits", [good, url, "--rows", "9" * 5000]),
            ("a seed that is no number", [good, url, "--seed", "x"]),
            ("no such file", [REAL.folder / "missing", url]),
            ("a folder", [REAL.folder, url]),
            ("an empty name", ["", url]),
            ("a name too long", ["x" * 5000, url]),
            ("a file's address", [good, f"file://{good}"]),
            ("ftp", [good, "ftp://127.0.0.1/"]),
            ("no scheme", [good, url.partition("//")[2]]),
            ("no host", [good, "http://"]), ("no host, a port",
                                             [good, "http://:8080"]),
            ("a query", [good, url + "/?x=1"]),
            ("a fragment", [good, url + "/#x"]),
            ("a user", [good, url.replace("//", "//me@")]),
            ("a user and a password", [good, url.replace("//", "//m:e@")]),
            ("a space", [good, url + "/a b"]),
            ("a line feed", [good, url + "\n"]),
            ("a line feed and a header", [good, url + "/\r\nX: y"]),
            ("an escape sequence", [good, url + "/\x1b[31m"]),
            ("DEL", [good, url + "/\x7f"]),
            ("an empty address", [good, ""]),
            ("an address of 301 characters",
             [good, "http://".ljust(301 + 7, "x")]),
            ("a path that is not ASCII", [good, url + "/\u00e9"]),
            ("a host that is not ASCII", [good, "http://\u00e9.invalid"]),
            ("a port of other digits", [good, "http://127.0.0.1:\u0663"]),
            ("an address of other digits", [good, "http://[\u0661::1]"]),
        ]

        def run(case):
            return subprocess.run(
                [sys.executable, str(kit.ROOT / "grade.py"),
                 *map(str, case[1])], env=kit.CLEAN, timeout=60,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for (name, _), done in together(run, table):
            with self.subTest(name):
                self.assertEqual((done.returncode, done.stdout), (2, b""),
                                 done)
                self.assertNotIn(b"Traceback", done.stderr)
                self.assertRegex(done.stderr, rb"\A[ -~\n]+\n\Z")
                self.assertLess(len(done.stderr), 6000)

    def test_a_file_that_may_not_be_read_ends_with_2(self):
        secret = REAL.folder / "secret.jsonl"
        secret.write_bytes(REAL.short)
        secret.chmod(0)
        try:
            secret.read_bytes()
        except OSError:  # it could be read by root
            self.assertEqual(grade(secret).code, 2)


class OnlyTheAddressGiven(GraderCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.witness = stack.enter_context(
            kit.serve(lambda link, number: kit.answer(link, 200, {})))
        self.elsewhere = f"127.0.0.1:{self.witness.port}"

    def tearDown(self):
        self.assertEqual(self.witness.count, 0, "somebody else was asked")

    def test_redirects_are_not_followed(self):
        cases = [(status, everywhere) for status in (
            300, 301, 302, 303, 307, 308) for everywhere in (False, True)]

        def run(case):
            return besiege(body({}, case[0], Refresh="0; http://"
                                + self.elsewhere, Location="http://"
                                + self.elsewhere + "/_trace/x"), case[1])
        for case, run in together(run, cases):
            with self.subTest(status=case[0], everywhere=case[1]):
                self.check_output(run)
                self.check_words(run, "yes ? ?" if case[1] else "yes yes ?")

    def test_a_redirect_home_is_not_followed_either(self):
        shop = Candidate()

        def serve_trace(link, name):
            if name.startswith("x-"):
                return Candidate.serve_trace(shop, link, name[2:])
            return kit.answer(link, 302, {}, Location=f"/_trace/x-{name}")
        with kit.serve(shop.talk) as server:
            rows = record(server.port)
            shop.serve_trace = serve_trace
            run = grade(lines(rows), f"http://127.0.0.1:{server.port}")
        self.check_output(run)
        self.check_words(run, "yes ? ?")
        self.assertFalse([line for line in shop.asked if "/x-" in line])

    def test_addresses_in_the_file_are_not_asked(self):
        there = REAL.long.replace(REAL.url.encode(),
                                  f"http://{self.elsewhere}".encode())
        run = grade(there, None, "--rows", 9)
        self.check_output(run, rows=4)
        self.check_words(run, "yes yes yes")
        for odd in (f"//{self.elsewhere}/x", f"@{self.elsewhere}/",
                    f"http://{self.elsewhere}/"):
            with self.subTest(odd):
                run = grade(bent(put(2, trace_id=odd)), None, "--rows", 9)
                self.check_words(run, "yes yes no")

    def test_loopback_needs_no_proxy(self):
        proxy = f"http://{self.elsewhere}"
        names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        for host in ("127.0.0.1", "localhost"):
            with self.subTest(host):
                run = grade(REAL.long, f"http://{host}:{REAL.shop.port}",
                            **dict.fromkeys(names, proxy))
                self.check_output(run)
                self.check_words(run, "yes yes yes")


class UnderAttack(GraderCase):
    def test_a_trace_that_is_an_attack(self):
        for (name, _, word), run in together(
                lambda case: besiege(case[1]), ATTACKS):
            with self.subTest(name):
                self.check_output(run)
                self.check_words(run, f"yes yes {word}")

    def test_every_answer_is_an_attack(self):
        for (name, _, word), run in together(
                lambda case: besiege(case[1], True), ATTACKS[::3]):
            with self.subTest(name):
                self.check_output(run)
                self.check_words(run, "yes . .")

    def test_depths_around_the_limit(self):
        """What was read must not be too deep to be compared and shown."""
        limit = int(subprocess.run(
            [sys.executable, "-c", LIMIT], stdout=subprocess.PIPE,
            timeout=60, check=True).stdout)
        depths = (100, limit // 2, *range(limit - 12, limit + 3, 3))
        for depth, run in together(lambda depth: besiege(body(
                b'{"method": "POST", "path": "/orders", "key": '
                b'"idem_recorded", "req": 1, "status": 201, "resp": '
                + b"[" * depth + b"]" * depth + b"}"), meter=False), depths):
            with self.subTest(depth=depth):
                self.check_output(run)
                self.check_words(run, "yes yes no")
        for depth, run in together(lambda depth: grade(
                REAL.long.replace(
                    b'"resp": {"error"', b'"resp": {"x": '
                    + b"[" * depth + b"]" * depth + b', "error"')), depths):
            with self.subTest(depth=depth, where="in the file"):
                self.check_output(run)
                self.assertNotIn("?", run.words)

    def test_slow_answers_end_in_time(self):
        for name, everywhere, future in REAL.slow:
            with self.subTest(name):
                run = future.result()
                self.check_output(run)
                self.check_words(run, "yes ? ?" if everywhere
                                 else "yes yes ?")
                if "after" not in name:
                    self.assertEqual(len(run.hit), 1,
                                     "asked again after the first silence")
                    self.assertGreater(run.took, 15)
                    self.assertLess(run.took, 39)


# ----------------------------------------------------------------------
# Fuzz

ODD = [None, True, False, 0, 1, 1.0, -1, 200, 201, 201.0, 409, 1e308,
       10 ** 30, "", "x", "POST", "/orders", "ord_x", "\u2028", "\ud800",
       "\x1b[31m", "x" * 3000, [], {}, [None], {"a": 1}, [[[[]]]],
       "http://127.0.0.1/orders", "/chat/completions", "create_order"]


def places(value, found=None, at=()):
    """Return the paths of all values inside a value."""
    found = [] if found is None else found
    found.append(at)
    inside = (value.items() if isinstance(value, dict)
              else enumerate(value) if isinstance(value, list) else ())
    for name, part in inside:
        places(part, found, at + (name,))
    return found


def bend_values(chance, rows):
    """Swap, copy, remove or rename values in rows, at random."""
    rows = copy.deepcopy(rows)
    for _ in range(chance.randint(1, 3)):
        paths = [path for path in places(rows) if len(path) > 1]
        path = chance.choice(paths)
        holder = rows
        for step in path[:-1]:
            holder = holder[step]
        action = chance.randrange(5)
        if action == 0:
            holder[path[-1]] = chance.choice(ODD)
        elif action == 1:  # a value from elsewhere
            other = rows
            for step in chance.choice(paths):
                other = other[step]
            holder[path[-1]] = copy.deepcopy(other)
        elif action == 2:
            del holder[path[-1]]
        elif action == 3 and isinstance(holder, dict):
            name = chance.choice(["line", "path", "x", "order_id", "body"])
            holder[name] = holder.pop(path[-1])
        else:
            row = chance.choice(rows)
            rows.insert(chance.randrange(len(rows)), copy.deepcopy(row))
    chance.random() < 0.2 and chance.shuffle(rows)
    return rows


def bend_bytes(chance, data):
    """Flip, cut, double or insert bytes, at random."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(data) + 1)
        action = chance.randrange(6)
        if action == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            del data[at:at + chance.choice((1, 2, 30, 600))]
        elif action == 2:
            data[at:at] = data[at:at + chance.choice((1, 40, 600))]
        elif action == 3:
            data[at:at] = chance.choice(
                (b"\n", b"\r", b"\0", b"\xff", b"\xe2\x80\xa8", b'"', b"{",
                 b"]", b",", b"1", b"-", b"e9", b"NaN", b"\\u0000",
                 b"\xef\xbb\xbf", b"[" * 5000, b"9" * 5000))
        elif action == 4:  # a digit becomes another
            digits = [n for n, byte in enumerate(data)
                      if chr(byte).isdigit()]
            if digits:
                data[chance.choice(digits)] = ord(chance.choice("0123456789"))
        else:
            parts = data.split(b"\n")
            chance.shuffle(parts)
            data = bytearray(b"\n".join(parts))
    return bytes(data)


def agree(row, trace):
    """Do a row and a trace say the same? Written without the grader."""
    path = urllib.parse.urlsplit(row["url"]).path
    return (trace["status"] == row["status"]
            and path.endswith(trace["path"])
            and all(canon(row.get(name)) == canon(trace[name]) for name in
                    ("method", "key", "req", "status", "resp")))


class Fuzz(GraderCase):
    def test_bent_files(self):
        count = FUZZ * 2 // 3
        traces = {row["trace_id"]: kit.ask(
            REAL.shop.port, "GET", f"/_trace/{row['trace_id']}")[1]
            for row in REAL.rows if row["trace_id"]}

        def run(number):
            chance = random.Random(f"file {FUZZ_SEED} {number}")
            if chance.random() < 0.6:
                file = lines(bend_values(chance, REAL.rows))
            else:
                file = bend_bytes(chance, REAL.long)
            return file, grade(file, None, "--rows",
                               chance.choice((1, 2, 50)))
        ends = dict.fromkeys((0, 1, 3), 0)
        for number, (file, run) in together(run, range(count)):
            with self.subTest(seed=FUZZ_SEED, number=number):
                self.check_output(run, rows=50)
                ends[run.code] += 1
                if run.code == 0:
                    self.assertTrue(run.samples)
                    for at in run.drawn():
                        row = json.loads(file.split(b"\n")[at - 1].decode(
                            "utf-8-sig"))
                        self.assertTrue(agree(
                            row, traces[row["trace_id"]]), (row, run.out))
        if count > 50:  # the bends are neither all mild nor all wild
            self.assertGreater(ends[0], 0)
            self.assertGreater(ends[1], count // 3)

    def test_bent_answers(self):
        def run(number):
            chance = random.Random(f"answer {FUZZ_SEED} {number}")
            shop = Candidate()
            sent = []

            def bend(whole):
                head, gap, text = whole.partition(b"\r\n\r\n")
                kind = chance.randrange(3)
                if kind == 0:  # bytes anywhere
                    return bend_bytes(chance, whole)
                trace = json.loads(text)
                if kind == 1:
                    text = bend_bytes(chance, text)
                else:
                    text = json.dumps(
                        bend_values(chance, [trace])[0]).encode()
                sent.append((text, trace))
                return re.sub(rb"Length: \d+", b"Length: %d" % len(text),
                              head) + gap + text

            def serve_trace(link, name):
                if name in recorded or number % 4 == 0:
                    link = Link(link, bend)
                Candidate.serve_trace(shop, link, name)
            with kit.serve(shop.talk) as server:
                rows = record(server.port)
                recorded = set(shop.traces)
                shop.serve_trace = serve_trace
                return sent, grade(lines(rows),
                                   f"http://127.0.0.1:{server.port}")
        for number, (sent, run) in together(run, range(FUZZ // 3)):
            with self.subTest(seed=FUZZ_SEED, number=number):
                self.check_output(run)
                for text, trace in sent if run.code == 0 else ():
                    told = json.loads(text)
                    told = dict(told, req=told.get("req", told.get("body")))
                    for name in ("key", "req", "status"):
                        self.assertEqual(canon(told[name]),
                                         canon(trace[name]), run.out)


if __name__ == "__main__":
    unittest.main()
