"""The shop: four answers, each remembered, under hostile clients too."""
import calendar
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import kit

load_tests = kit.beside
ORDER = {"sku": "sku_light", "qty": 2}
POST = b"POST /orders HTTP/1.1\r\nHost: x\r\nIdempotency-Key: raw\r\n"


def raw(port, data, finish=False, timeout=12):
    """Send bytes on a connection of their own; return all that comes
    until the shop closes it, or goes quiet after an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout) as link:
        link.sendall(data)
        if finish:
            link.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(OSError):
            while True:
                part = link.recv(65536)
                if not part:
                    return got + b"<closed>"
                got += part
                link.settimeout(0.3)
        return got


def statuses(answer):
    return [int(each) for each in
            re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def peak(process):
    """Return the threads of a process, where there is a /proc."""
    path = pathlib.Path(f"/proc/{process.pid}/task")
    return len(list(path.iterdir())) if path.exists() else None


class Routes(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.shop = cls.stack.enter_context(kit.shop())
        cls.port = cls.shop.port

    @classmethod
    def tearDownClass(cls):
        cls.shop.terminate()
        said = cls.shop.stderr.read()
        cls.stack.close()
        assert said == "", said  # nobody's request is worth a traceback

    def traced(self, key, req, status, resp, headers):
        """The trace says exactly what was asked and answered."""
        self.assertEqual(resp["trace_id"], headers["X-Trace-Id"])
        got, trace, more = kit.ask(
            self.port, "GET", f"/_trace/{resp['trace_id']}")
        self.assertEqual(got, 200)
        self.assertIsNone(more["X-Trace-Id"])
        at = trace.pop("at")
        self.assertAlmostEqual(time.time(), calendar.timegm(
            time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")), delta=5)
        self.assertIs(type(trace["status"]), int)
        self.assertEqual(trace, {
            "trace_id": resp["trace_id"], "method": "POST",
            "path": "/orders", "key": key, "req": req,
            "status": status, "resp": resp})

    def test_a_key_is_one_order(self):
        told = []
        for due, qty in (201, 2), (200, 2), (409, 3), (200, 2):
            req = {"qty": qty, "sku": "sku_light"}
            status, resp, headers = kit.ask(
                self.port, "POST", "/orders", req, key="one")
            self.assertEqual(status, due)
            self.traced("one", req, status, resp, headers)
            told.append(resp.pop("trace_id"))
            if due == 409:
                self.assertEqual(resp, {"error": "idempotency conflict"})
            else:
                self.assertEqual(set(resp), {"ok", "order_id"})
                self.assertIs(resp["ok"], True)
                order_id = resp["order_id"]
                self.assertRegex(order_id, r"^ord_[0-9a-f]{12,}$")
        self.assertEqual(len(set(told)), 4)
        status, resp, headers = kit.ask(
            self.port, "GET", f"/orders/{order_id}")
        self.assertEqual((status, resp), (200, {
            "order_id": order_id, "body": ORDER, "key": "one"}))
        self.assertIsNone(headers["X-Trace-Id"])

    def test_what_is_wrong_gets_400_a_trace_and_leaves_the_key(self):
        deep = "[" * 4000 + "]" * 4000
        table = [  # body as sent, req as traced (None: the text)
            ("", None), ("{", "{"), ("nope", "nope"), ("null", None),
            ("[]", []), ('"x"', "x"), ("2", 2), ("{}", {}),
            ('{"sku": "a"}', {"sku": "a"}),
            ('{"sku": "a", "qty": 1, "x": 1}',
             {"sku": "a", "qty": 1, "x": 1}),
            ('{"sku": "", "qty": 1}', {"sku": "", "qty": 1}),
            ('{"sku": 5, "qty": 1}', {"sku": 5, "qty": 1}),
            ('{"sku": null, "qty": 1}', {"sku": None, "qty": 1}),
            ('{"sku": "a", "qty": 0}', {"sku": "a", "qty": 0}),
            ('{"sku": "a", "qty": -1}', {"sku": "a", "qty": -1}),
            ('{"sku": "a", "qty": 2.0}', {"sku": "a", "qty": 2.0}),
            ('{"sku": "a", "qty": 1e2}', {"sku": "a", "qty": 100.0}),
            ('{"sku": "a", "qty": "2"}', {"sku": "a", "qty": "2"}),
            ('{"sku": "a", "qty": true}', {"sku": "a", "qty": True}),
            ('{"sku": "a", "qty": null}', {"sku": "a", "qty": None}),
            ('{"sku": "a", "qty": NaN}', '{"sku": "a", "qty": NaN}'),
            ('{"sku": "a", "qty": 1e999}', '{"sku": "a", "qty": 1e999}'),
            ('{"sku": "a", "qty": -Infinity}',
             '{"sku": "a", "qty": -Infinity}'),
            ("\ufeff{}", "\ufeff{}"), (b"\xff\xfe{", "\ufffd\ufffd{"),
            ('{"sku": "a", "qty": 1} {}', '{"sku": "a", "qty": 1} {}'),
            ('{"sku": "a", "qty": %s}' % ("9" * 5000),
             '{"sku": "a", "qty": %s}' % ("9" * 5000)),
        ]
        for body, req in table:
            with self.subTest(str(body)[:40]):
                body = body if isinstance(body, bytes) else body.encode()
                status, resp, headers = kit.ask(
                    self.port, "POST", "/orders", body, key="wrong")
                self.assertEqual(status, 400)
                self.assertEqual(headers["Content-Type"],
                                 "application/json")
                self.assertEqual(set(resp), {"error", "trace_id"})
                self.traced("wrong", req, 400, resp, headers)
        for body in ('{"sku": "a", "sku": "a", "qty": 1}', deep):
            with self.subTest(body[:40]):
                status, resp, headers = kit.ask(
                    self.port, "POST", "/orders", body, key="wrong")
                self.assertEqual(status, 400)
                trace = kit.ask(self.port, "GET",
                                f"/_trace/{resp['trace_id']}")[1]
                self.assertEqual(trace["status"], 400)
        self.assertEqual(kit.ask(self.port, "POST", "/orders", ORDER,
                                 key="wrong")[0], 201)

    def test_a_key_has_1_to_255_characters_and_comes_once(self):
        body = json.dumps(ORDER).encode()
        size = b"Content-Length: %d\r\n\r\n" % len(body)
        start = b"POST /orders HTTP/1.1\r\nHost: x\r\n"
        table = [  # header lines, key as traced
            (b"", None),
            (b"Idempotency-Key: \r\n", ""),
            (b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n", "a, a"),
            (b"Idempotency-Key: %s\r\n" % (b"k" * 256), "k" * 256)]
        for lines, key in table:
            with self.subTest(lines[:40]):
                got = raw(self.port, start + lines + size + body)
                self.assertEqual(statuses(got), [400])
                resp = json.loads(got.partition(b"\r\n\r\n")[2])
                trace = kit.ask(self.port, "GET",
                                f"/_trace/{resp['trace_id']}")[1]
                self.assertEqual((trace["key"], trace["req"]), (key, ORDER))
        self.assertEqual(kit.ask(self.port, "POST", "/orders", ORDER,
                                 key="k" * 255)[0], 201)

    def test_what_is_refused_unread_is_json_and_not_traced(self):
        long = b"a" * 70000
        body = json.dumps(ORDER).encode()
        table = [  # request, status, is the connection closed?
            (POST + b"\r\n", 400),
            (POST + b"Content-Length: -1\r\n\r\n", 400),
            (POST + b"Content-Length: +30\r\n\r\n" + body, 400),
            (POST + b"Content-Length: 3 0\r\n\r\n" + body, 400),
            (POST + b"Content-Length: \xb2\r\n\r\n", 400),
            (POST + b"Content-Length: 30 \r\n\r\n" + body, 400),
            (POST + b"Content-Length:\r\n\r\n", 400),
            (POST + b"Content-Length: 0x1e\r\n\r\n" + body, 400),
            (POST + b"Content-Length: 3_0\r\n\r\n" + body, 400),
            (POST + b"Content-Length: 30\r\ncontent-length: 30\r\n\r\n"
             + body, 400),
            (POST + b"Content-Length: 30\r\nTransfer-Encoding: chunked\r\n"
             b"\r\n" + body, 400),
            (POST + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (POST + b"Content-Length: 8193\r\n\r\n", 413),
            (POST + b"Content-Length: " + b"9" * 6000 + b"\r\n\r\n", 413),
            (b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 404),
            (b"POST /orders/ HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
             404),
            (b"POST /ordersx HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
             404),
            (b"GET /x HTTP/1.1\r\n\r\n", 404),
            (b"GET /orders HTTP/1.1\r\n\r\n", 404),
            (b"GET /orders/x HTTP/1.1\r\n\r\n", 404),
            (b"GET /_trace/ HTTP/1.1\r\n\r\n", 404),
            (b"GET /_trace/../orders HTTP/1.1\r\n\r\n", 404),
            (b"PUT /orders HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 501),
            (b"DELETE / HTTP/1.1\r\n\r\n", 501),
            (b"post /orders HTTP/1.1\r\n\r\n", 501),
            (b"garbage\r\n\r\n", 400),
            (b"GET / HTTP/9.9\r\n\r\n", 505),
            (b"GET / NOPE/1.1\r\n\r\n", 400),
            (b"\x16\x03\x01\r\n\r\n", 400),
            (b'G"T / HTTP/1.1\r\n\r\n', 501),
            (b"POST /\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nContent-Length: 8193\r\n\r\n", 413),
            (b"GET /" + long + b" HTTP/1.1\r\n\r\n", 414),
            (b"GET / HTTP/1.1\r\nA: " + long + b"\r\n\r\n", 431),
            (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431)]
        for request, status in table:
            with self.subTest(request[:60]):
                got = raw(self.port, request)
                self.assertEqual(statuses(got), [status])
                head, _, body = got.partition(b"\r\n\r\n")
                self.assertTrue(body.endswith(b"<closed>"), body[-50:])
                body = body[:-len(b"<closed>")]
                self.assertIn(b"Content-Type: application/json", head)
                self.assertIn(b"Content-Length: %d" % len(body), head)
                self.assertNotIn(b"X-Trace-Id", head)
                self.assertEqual(list(json.loads(body)), ["error"])

    def test_a_body_of_8192_bytes_is_read_and_a_larger_one_is_not(self):
        for size, due in (8192, 201), (8193, 413), (100000, 413):
            body = json.dumps(ORDER).encode().ljust(size)
            status, resp, _ = kit.ask(
                self.port, "POST", "/orders", body, key=f"size {size}")
            self.assertEqual(status, due)

    def test_a_body_that_is_cut_off_is_no_order(self):
        whole = json.dumps(ORDER).encode()
        got = raw(self.port, POST.replace(b"raw", b"cut")
                  + b"Content-Length: 40\r\n\r\n" + whole, finish=True)
        self.assertEqual(statuses(got), [400])
        self.assertEqual(kit.ask(self.port, "POST", "/orders", ORDER,
                                 key="cut")[0], 201)

    def test_head_is_501_without_a_body(self):
        got = raw(self.port, b"HEAD / HTTP/1.1\r\n\r\n")
        self.assertEqual(statuses(got), [501])
        self.assertTrue(got.endswith(b"\r\n\r\n<closed>"))

    def test_the_root_says_that_the_process_lives(self):
        for path in "/", "/?probe=1":
            self.assertEqual(kit.ask(self.port, "GET", path)[:2],
                             (200, {"ok": True}))

    def test_a_query_is_not_part_of_the_path(self):
        status, resp, headers = kit.ask(
            self.port, "POST", "/orders?a=b", ORDER, key="query")
        self.assertEqual(status, 201)
        self.traced("query", ORDER, 201, resp, headers)

    def test_a_connection_is_kept_and_two_requests_get_two_answers(self):
        body = json.dumps(ORDER).encode()
        one = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        look = b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
        got = raw(self.port, one + one + look + one)
        self.assertEqual(statuses(got), [201, 200, 200, 200])
        self.assertFalse(got.endswith(b"<closed>"))

    def test_an_answer_is_one_packet(self):
        body = json.dumps(ORDER).encode()
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            for _ in range(20):
                link.sendall(POST + b"Content-Length: %d\r\n\r\n"
                             % len(body) + body)
                got = link.recv(65536)
                self.assertTrue(got.endswith(b"}"), got)

    def test_100_continue_comes_before_the_body(self):
        body = json.dumps(ORDER).encode()
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(POST.replace(b"raw", b"expect")
                         + b"Expect: 100-continue\r\n"
                         + b"Content-Length: %d\r\n\r\n" % len(body))
            self.assertEqual(statuses(link.recv(65536)), [100])
            link.sendall(body)
            self.assertEqual(statuses(link.recv(65536)), [201])

    def test_a_request_without_a_version_gets_a_status_line(self):
        got = raw(self.port, b"GET /\r\n\r\n")
        self.assertEqual(statuses(got), [200])
        self.assertTrue(got.endswith(b'{"ok": true}<closed>'))

    def test_of_32_clients_with_one_key_one_places_the_order(self):
        """All have sent all but the last byte when the race starts; a
        JOURNAL, since its write lets other threads run."""
        body = json.dumps({"sku": "a" * 8000, "qty": 2}).encode()
        with tempfile.TemporaryDirectory() as folder, \
                kit.shop(JOURNAL=f"{folder}/traces.jsonl") as shop, \
                contextlib.ExitStack() as stack:
            links = [stack.enter_context(socket.create_connection(
                ("127.0.0.1", shop.port), 10)) for _ in range(32)]
            for race in range(10):
                for link in links:
                    link.sendall(POST.replace(b"raw", b"race %d" % race)
                                 + b"Content-Length: %d\r\n\r\n"
                                 % len(body) + body[:-1])
                for link in links:
                    link.sendall(body[-1:])
                got = [link.recv(65536) for link in links]
                self.assertEqual(sorted(map(statuses, got)),
                                 [[200]] * 31 + [[201]])
                self.assertEqual(len(set(re.findall(
                    rb"ord_[0-9a-f]+", b"".join(got)))), 1)

    def test_256_clients_at_once_are_served(self):
        with concurrent.futures.ThreadPoolExecutor(256) as pool:
            got = list(pool.map(lambda number: kit.ask(
                self.port, "POST", "/orders", ORDER,
                key=f"many {number}")[0], range(256)))
        self.assertEqual(got, [201] * 256)

    def test_clients_that_hang_up_are_no_news(self):
        """tearDownClass sees that nothing was printed."""
        reset = struct.pack("ii", 1, 0)
        for part in b"", b"POST /or", POST, POST + b"Content-Length: 9\r\n" \
                b"\r\n{", b"GET / HTTP/1.1\r\n\r\n" * 200:
            for _ in range(5):
                link = socket.create_connection(("127.0.0.1", self.port), 5)
                link.sendall(part)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                link.close()
        self.assertEqual(kit.ask(self.port, "GET", "/")[0], 200)


class Patience(unittest.TestCase):

    def test_200_stalled_clients_delay_nobody_and_are_let_go(self):
        parts = [b"", b"POST /ord", POST, POST + b"Content-Length: 30\r\n"
                 b"\r\n{", b"GET / HTTP/1.1\r\n"]
        with kit.shop() as shop, contextlib.ExitStack() as stack:
            links = [stack.enter_context(socket.create_connection(
                ("127.0.0.1", shop.port), 15)) for _ in range(200)]
            start = time.monotonic()
            for number, link in enumerate(links):
                link.sendall(parts[number % len(parts)])
            for number in range(20):
                before = time.monotonic()
                status = kit.ask(shop.port, "POST", "/orders", ORDER,
                                 key=str(number))[0]
                self.assertEqual(status, 201)
                self.assertLess(time.monotonic() - before, 0.8)
            for link in links:
                self.assertEqual(link.recv(100), b"")
            self.assertLess(time.monotonic() - start, 10)
            threads = peak(shop)
            if threads is not None:
                self.assertLess(threads, 20)


class Start(unittest.TestCase):

    def start(self, **env):
        return subprocess.run(
            [sys.executable, str(kit.ROOT / "stub_shop.py")], timeout=20,
            env=dict(kit.CLEAN, **dict(dict(HOST="127.0.0.1", PORT="0"),
                                       **env)),
            stderr=subprocess.PIPE, encoding="utf-8")

    def test_what_cannot_be_served_is_one_sentence(self):
        with tempfile.TemporaryDirectory() as folder, kit.shop() as other:
            table = [
                dict(PORT="http"), dict(PORT=""), dict(PORT="70000"),
                dict(PORT="-1"), dict(HOST="no.such.host.invalid"),
                dict(PORT=str(other.port)), dict(JOURNAL=folder),
                dict(JOURNAL=f"{folder}/no/such")]
            for env in table:
                with self.subTest(env):
                    done = self.start(**env)
                    self.assertNotEqual(done.returncode, 0)
                    self.assertEqual(len(done.stderr.splitlines()), 1)
                    self.assertNotIn("Traceback", done.stderr)

    def test_a_signal_ends_it_quietly_with_0(self):
        for number in signal.SIGINT, signal.SIGTERM:
            with self.subTest(number), kit.shop() as shop, \
                    socket.create_connection(("127.0.0.1", shop.port)):
                kit.ask(shop.port, "GET", "/")  # beside an idle client
                shop.send_signal(number)
                self.assertEqual(shop.wait(5), 0)
                self.assertEqual(shop.stderr.read(), "")

    def test_the_first_line_says_where_and_whether_traces_survive(self):
        with tempfile.TemporaryDirectory() as folder:
            journal = f"{folder}/journal"
            with kit.shop() as shop:
                self.assertRegex(
                    shop.line, r"http://127\.0\.0\.1:\d+, traces die")
            with kit.shop(JOURNAL=journal) as shop:
                self.assertIn(f"traces live in {journal}", shop.line)


    def test_without_settings_it_is_port_8080_on_every_address(self):
        """Read from the sentences that say what cannot be served."""
        for env, said in (dict(PORT="x"), "0.0.0.0:x"), \
                (dict(HOST="no.such.host.invalid"),
                 "no.such.host.invalid:8080"):
            done = subprocess.run(
                [sys.executable, str(kit.ROOT / "stub_shop.py")],
                env=dict(kit.CLEAN, **env), timeout=20,
                stderr=subprocess.PIPE, encoding="utf-8")
            self.assertIn(f" {said}: ", done.stderr)

    @unittest.skipIf(os.name == "nt", "there the option means sharing")
    def test_the_port_can_be_taken_again_at_once(self):
        with kit.shop() as shop:
            raw(shop.port, b"GET /x HTTP/1.1\r\n\r\n")  # it hangs up
        with kit.shop(port=shop.port) as again:
            self.assertEqual(again.port, shop.port)


class Journal(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "traces.jsonl")

    def fill(self, count=3):
        """Return the bytes of the traces of some orders, by their id."""
        with kit.shop(JOURNAL=str(self.path)) as shop:
            for number in range(count):
                for qty in 1, 1, 2, 0:
                    kit.ask(shop.port, "POST", "/orders",
                            {"sku": "a", "qty": qty}, key=f"key {number}")
            return self.traces(shop.port)

    def traces(self, port):
        """Ask for each line of the file; it is what is served."""
        found = {}
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for line in self.path.read_bytes().splitlines():
            trace_id = json.loads(line)["trace_id"]
            link.request("GET", f"/_trace/{trace_id}")
            found[trace_id] = link.getresponse().read()
            self.assertEqual(found[trace_id], line)
        link.close()
        return found

    def test_a_restart_gives_back_every_order_key_and_trace(self):
        before = self.fill()
        self.assertEqual(len(before), 12)
        first = json.loads(list(before.values())[0])
        order_id = first["resp"]["order_id"]
        with kit.shop(JOURNAL=str(self.path)) as shop:
            self.assertEqual(self.traces(shop.port), before)
            self.assertEqual(
                kit.ask(shop.port, "GET", f"/orders/{order_id}")[:2],
                (200, {"order_id": order_id, "key": "key 0",
                       "body": {"sku": "a", "qty": 1}}))
            for qty, due in (1, 200), (2, 409):
                status, resp, _ = kit.ask(
                    shop.port, "POST", "/orders",
                    {"sku": "a", "qty": qty}, key="key 0")
                self.assertEqual(status, due)
                if due == 200:
                    self.assertEqual(resp["order_id"], order_id)

    def test_a_torn_last_line_is_cut_off_with_a_note(self):
        self.fill()
        whole = self.path.read_bytes()
        lines = whole.splitlines(keepends=True)
        for torn in 1, 7, 40:
            with self.subTest(torn):
                self.path.write_bytes(whole[:-torn])
                with kit.shop(JOURNAL=str(self.path)) as shop:
                    self.assertEqual(
                        shop.line, f"{self.path}: torn line cut off\n")
                    self.assertRegex(shop.stderr.readline(), "traces live")
                self.assertEqual(self.path.read_bytes(),
                                 b"".join(lines[:-1]))

    def test_a_bad_line_elsewhere_is_named_and_nothing_is_changed(self):
        self.fill()
        lines = self.path.read_bytes().splitlines(keepends=True)
        bent = json.loads(lines[0])
        del bent["resp"]["order_id"]
        less = json.loads(lines[1])
        del less["key"]
        for bad in (b"nope\n", b"\n", b"[]\n", b"{}\n", b"5\n", b"null\n",
                    b'"x"\n', b"\xff\n", lines[1][:-9] + b"\n",
                    json.dumps(bent).encode() + b"\n",
                    json.dumps(less).encode() + b"\n"):
            with self.subTest(bad[:30]):
                whole = lines[0] + bad + b"".join(lines[2:]) + b"{"
                self.path.write_bytes(whole)
                with kit.shop(JOURNAL=str(self.path)) as shop:
                    self.assertNotEqual(shop.wait(10), 0)
                    said = shop.line + shop.stderr.read()
                self.assertIn(f"{self.path}:2", said)
                self.assertEqual(len(said.splitlines()), 1)
                self.assertEqual(self.path.read_bytes(), whole)

    def test_the_port_is_taken_before_the_file_is_touched(self):
        with kit.shop() as other:
            self.path.write_bytes(b"{torn")
            with kit.shop(port=other.port,
                          JOURNAL=str(self.path)) as shop:
                self.assertNotEqual(shop.wait(10), 0)
            self.assertEqual(self.path.read_bytes(), b"{torn")

    def test_kill_9_under_load_loses_nothing_that_was_answered(self):
        answered = {}

        def order(port, name):
            with contextlib.suppress(OSError, http.client.HTTPException):
                for number in range(10000):
                    key = f"{name} {number}"
                    status, resp, _ = kit.ask(
                        port, "POST", "/orders", ORDER, key=key)
                    answered[key] = status, resp

        for kill in range(6):
            with kit.shop(JOURNAL=str(self.path)) as shop:
                threads = [threading.Thread(
                    target=order, args=(shop.port, f"{kill} {each}"))
                    for each in range(6)]
                for thread in threads:
                    thread.start()
                time.sleep(0.4)
                shop.kill()
                for thread in threads:
                    thread.join()
        self.assertGreater(len(answered), 100)
        with kit.shop(JOURNAL=str(self.path)) as shop:
            traces = self.traces(shop.port)
            for key, (status, resp) in answered.items():
                trace = json.loads(traces[resp["trace_id"]])
                self.assertEqual((trace["key"], trace["resp"]), (key, resp))
            again = kit.ask(shop.port, "POST", "/orders", ORDER, key=key)
            self.assertEqual(again[0], 200)
            self.assertEqual(again[1]["order_id"], resp["order_id"])

    @unittest.skipIf(os.name == "nt", "Windows has no file size limit")
    def test_a_full_disk_is_503_and_the_key_works_later(self):
        import resource
        size = 2048

        def limit():
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        process = subprocess.Popen(
            [sys.executable, str(kit.ROOT / "stub_shop.py")],
            stderr=subprocess.PIPE, text=True, preexec_fn=limit,
            env=dict(kit.CLEAN, HOST="127.0.0.1", PORT="0",
                     JOURNAL=str(self.path)))
        try:
            port = int(re.search(r":(\d+), traces",
                                 process.stderr.readline())[1])
            got = [kit.ask(port, "POST", "/orders", ORDER, key=str(number))
                   for number in range(12)]
            full = [number for number, each in enumerate(got)
                    if each[0] == 503]
            self.assertTrue(full)
            self.assertEqual({each[0] for each in got}, {201, 503})
            for number in full:
                self.assertEqual(list(got[number][1]), ["error"])
                self.assertIsNone(got[number][2]["X-Trace-Id"])
            lines = self.path.read_bytes().splitlines(keepends=True)
            self.assertEqual(len(lines), 12 - len(full))
            self.traces(port)
            if hasattr(resource, "prlimit"):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE,
                                 (10**6, resource.getrlimit(
                                     resource.RLIMIT_FSIZE)[1]))
                status, resp, _ = kit.ask(port, "POST", "/orders", ORDER,
                                          key=str(full[0]))
                self.assertEqual(status, 201)
                self.traces(port)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()

    def test_at_100_000_traces_orders_are_503_and_look_ups_go_on(self):
        self.fill(1)
        line = self.path.read_text().splitlines()[0]
        first = json.loads(line)["trace_id"]
        with self.path.open("a") as journal:
            for number in range(99_996 - 1):
                journal.write(line.replace(first, f"{number:032x}") + "\n")
        with kit.shop(JOURNAL=str(self.path)) as shop:
            self.assertEqual(kit.ask(shop.port, "POST", "/orders", ORDER,
                                     key="last")[0], 201)
            status, resp, headers = kit.ask(
                shop.port, "POST", "/orders", ORDER, key="next")
            self.assertEqual((status, resp),
                             (503, {"error": "trace store full"}))
            self.assertIsNone(headers["X-Trace-Id"])
            self.assertEqual(
                kit.ask(shop.port, "GET", f"/_trace/{first}")[0], 200)


if __name__ == "__main__":
    unittest.main()
