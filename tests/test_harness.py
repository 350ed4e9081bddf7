"""The harness: one row a hop, nothing repaired, nothing invented."""
import base64
import calendar
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import kit

load_tests = kit.beside
CASES = pathlib.Path(__file__).with_name("cases") / "model_answers.jsonl"
API_KEY = "sk-never-written-anywhere"
CALL = {"id": "c1", "type": "function", "function": {
    "name": "create_order",
    "arguments": '{"sku": "sku_light", "qty": 2}'}}


def chat(content=None, *calls):
    """Return a chat completion that says something and makes calls."""
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return {"choices": [{"index": 0, "message": message}]}


def model_of(answers, seen):
    """Return a server's talk that gives each answer once, the last
    for ever; an answer is (status, body, headers)."""
    def talk(link, number):
        first, headers, body = kit.read_request(link)
        seen.append((first, headers, json.loads(body)))
        status, answer, more = answers[min(number, len(answers)) - 1]
        kit.answer(link, status, answer, **more)
    return talk


def place(shop_url, answers, *args, **env):
    """Run the harness against a shop and a model that answers so.

    Return the finished process, its rows and what the model saw."""
    seen = []
    with kit.serve(model_of(answers, seen)) as model, \
            tempfile.TemporaryDirectory() as folder:
        settings = dict(STUB_URL=shop_url, MODEL_NAME="any",
                        MODEL_BASE_URL=f"http://127.0.0.1:{model.port}/v1",
                        MODEL_API_KEY=API_KEY)
        settings.update(env)
        start = int(time.time())
        done = kit.run("harness.py", *args, cwd=folder, **settings)
        done.when = range(start, int(time.time()) + 1)
        raw = pathlib.Path(folder, "replay.jsonl").read_text("utf-8")
    done.raw = raw
    return done, [json.loads(line) for line in raw.splitlines()], seen


def talker(*turns):
    """Return a shop's talk: each turn is called with the socket."""
    def talk(link, number):
        first, headers, body = kit.read_request(link)
        talk.keys.append(headers.get("idempotency-key"))
        talk.times.append(time.monotonic())
        talk.seen.append((first, headers, json.loads(body)))
        turns[min(number, len(turns)) - 1](link)
    talk.keys, talk.times, talk.seen = [], [], []
    return talk


def gives(status, body=None, **headers):
    if body is None:
        body = {"ok": True, "order_id": "ord_0123456789ab"}
    return lambda link: kit.answer(link, status, body, **headers)


def lose(link):
    """Hang up without an answer."""


def cut(link):
    link.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\n"
                 b'{"ok": true, "order')


def greet(link):
    link.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def shout(link):
    link.sendall(b"HTTP/1.1 201 Created\r\n" + b"A: b\r\n" * 300 + b"\r\n")


SHOPS = [  # what the shop does, statuses in the file, exit
    ("loses one answer", [lose, gives(200)], [None, 200], 0),
    ("loses every answer", [lose], [None] * 3, 1),
    ("cuts an answer", [cut, gives(200)], [None, 200], 0),
    ("is busy", [gives(429, {}, Retry_After="1"), gives(201)],
     [429, 201], 0),
    ("is broken", [gives(500, {}), gives(502, {}), gives(201)],
     [500, 502, 201], 0),
    ("is away", [gives(503, b"away"), gives(504, {}), gives(201)],
     [503, 504, 201], 0),
    ("is broken for good", [gives(500, {})], [500] * 3, 1),
    ("says 409 with an order", [gives(409)], [409], 1),
    ("says 400 with an order", [gives(400)], [400], 1),
    ("says 401", [gives(401, {})], [401], 1),
    ("says 404", [gives(404, {})], [404], 1),
    ("says 501", [gives(501, {})], [501], 1),
    ("sends elsewhere", [gives(302, {}, Location="/x")], [302], 1),
    ("sends elsewhere, 308", [gives(308, {}, Location="/x")],
     [308], 1),
    ("answers a page", [gives(201, b"<html>")], [201], 1),
    ("answers {}", [gives(201, {})], [201], 1),
    ("answers nothing", [gives(201, b"")], [201], 1),
    ("answers a number", [gives(201, b"5")], [201], 1),
    ("greets like SSH", [greet, gives(201)], [None, 201], 0),
    ("sends 300 headers", [shout, gives(201)], [None, 201], 0),
]

PAUSES = [  # Retry-After, seconds between the attempts
    ({}, [1, 3]),
    ({"Retry_After": "0"}, [0, 0]),
    ({"Retry_After": "2"}, [2, 2]),
    ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, [1, 3]),
    ({"Retry_After": "-5"}, [1, 3])]

ORDERS = [(200, chat(None, CALL), {}), (200, chat("done"), {})]


def misbehave(row):
    """Let the model order once from a shop that does as the row says."""
    talk = talker(*row[1])
    with kit.serve(talk) as shop:
        ended = place(f"http://127.0.0.1:{shop.port}", ORDERS)
    return row, talk.keys, ended


def pause(row):
    """Return the row and the times between the attempts at an order."""
    talk = talker(gives(503, {}, **row[0]))
    with kit.serve(talk) as shop:
        place(f"http://127.0.0.1:{shop.port}", ORDERS)
    return row, [later - sooner for sooner, later
                 in zip(talk.times, talk.times[1:])]


def reach(url):
    """Return the URL and what came of a model that is not there."""
    return url, place("http://127.0.0.1:9", [], MODEL_BASE_URL=url)


def echo(_):
    """Return what comes of a model that greets with the API key."""
    def talk(link, number):
        headers = kit.read_request(link)[1]
        link.sendall(f"HTTP/1.1 {headers['authorization']}\r\n\r\n"
                     .encode())

    with kit.serve(talk) as model:
        return place("http://127.0.0.1:9", [],
                     MODEL_BASE_URL=f"http://127.0.0.1:{model.port}")


def tunnel(_):
    """Return what comes of a proxy whose refusal is coloured."""
    def talk(link, number):
        kit.read_request(link)
        link.sendall(b"HTTP/1.1 403 \x1b[31mno\x07\r\n\r\n")

    with kit.serve(talk) as proxy:
        return place("http://127.0.0.1:9", [],
                     MODEL_BASE_URL="https://model.example",
                     https_proxy=f"http://127.0.0.1:{proxy.port}")


def dripped(_):
    """Return how long it takes to give up a model that drips."""
    def drip(link, number):
        kit.read_request(link)
        link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            link.sendall(b" ")
            time.sleep(0.2)

    start = time.monotonic()
    with kit.serve(drip) as model:
        done, rows, _ = place(
            "http://127.0.0.1:9", [], TIMEOUT="1",
            MODEL_BASE_URL=f"http://127.0.0.1:{model.port}")
    return done, rows, time.monotonic() - start


class Harness(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        """Start all that waits; the tests look at what came of it."""
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(12))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            cls.journal = pathlib.Path(folder, "traces.jsonl")
            cls.shop = stack.enter_context(
                kit.shop(JOURNAL=str(cls.journal)))
            cls.dripped = pool.map(dripped, [1])
            cls.echoed = pool.map(echo, [1])
            cls.tunnelled = pool.map(tunnel, [1])
            cls.reached = pool.map(reach, [
                "http://[::1]:9/v1", "http://127.0.0.1:99999",
                "http://../v1", "http://" + "a" * 300])
            cls.paused = pool.map(pause, PAUSES)
            cls.misbehaved = pool.map(misbehave, SHOPS)
            cls.cases = pool.map(cls.run_case, [
                json.loads(line) for line in
                CASES.read_text("utf-8").splitlines()])
            cls.stack = stack.pop_all()

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()

    def check_always(self, done, rows, seen):
        """What holds of every run, whatever came back."""
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn(API_KEY, done.raw + done.stdout + done.stderr)
        self.assertNotRegex(done.stdout + done.stderr, r"[^\n -~]")
        out = json.loads(done.stdout)
        self.assertEqual(set(out), {"final", "orders", "replay"})
        self.assertEqual(out["orders"], [
            {"order_id": row["resp"]["order_id"], "status": row["status"],
             "key": row["key"], "trace_id": row["trace_id"]}
            for row in rows if row["key"] and row["status"] in (200, 201)
            and isinstance(row["resp"], dict) and "order_id" in row["resp"]
        ])
        for row in rows:
            fields = {"trace_id", "at", "method", "url", "key", "req",
                      "status", "resp"}
            if row["status"] is None:
                fields.add("error")
                self.assertIsNone(row["resp"])
            self.assertEqual(set(row), fields)
            self.assertIn(calendar.timegm(time.strptime(
                row["at"], "%Y-%m-%dT%H:%M:%SZ")), done.when)
        progress = done.stderr.splitlines()
        self.assertEqual(len(progress), len(rows) + done.returncode)
        for line, row in zip(progress, rows):
            self.assertTrue(line.startswith(f"POST {row['url']} "), line)
        for first, headers, body in seen:
            self.assertEqual(headers["authorization"], f"Bearer {API_KEY}")
            self.assertNotIn("python", headers["user-agent"].lower())
            self.assertIs(body["stream"], False)
            self.check_ids(body["messages"])

    def check_ids(self, messages):
        """Every tool call is answered, in order, under its own id."""
        due = []
        for message in messages:
            if message["role"] == "tool":
                self.assertEqual(message["tool_call_id"], due.pop(0))
            else:
                self.assertEqual(due, [])
                calls = message.get("tool_calls")
                due = [call["id"] for call in calls or []]
        self.assertEqual(due, [])

    @classmethod
    def run_case(cls, case):
        answers = []
        for answer in case["answers"]:
            body = answer.get("body", "").encode()
            if "body_base64" in answer:
                body = base64.b64decode(answer["body_base64"])
            answers.append((answer["status"], body, {
                name.replace("-", "_"): value
                for name, value in answer["headers"].items()}))
        return case, place(f"http://127.0.0.1:{cls.shop.port}", answers)

    def test_every_reported_model_answer_ends_as_the_contract_says(self):
        told = set()
        for case, (done, rows, seen) in self.cases:
            with self.subTest(case["case"]):
                self.assertEqual(done.returncode, case["exit"], done.stderr)
                placed = [row for row in rows if row["status"] == 201]
                if case["orders"] is not None:
                    self.assertEqual(len(placed), case["orders"])
                if case["rows"] is not None:
                    self.assertEqual(len(rows), case["rows"])
                shop_rows = [row for row in rows if row["key"]]
                self.assertEqual(len(shop_rows), len(
                    {row["key"] for row in shop_rows}), "a key for a call")
                for row in shop_rows:
                    told.add(row["trace_id"])
                    self.check_trace(row)
                self.check_always(done, rows, seen)
        # The shop got nothing that is not a row.
        self.assertEqual(told, {
            json.loads(line)["trace_id"] for line
            in self.journal.read_text().splitlines()})

    def check_trace(self, row):
        """The shop remembers what the row says."""
        status, trace, _ = kit.ask(
            self.shop.port, "GET", f"/_trace/{row['trace_id']}")
        self.assertEqual(status, 200)
        self.assertTrue(row["url"].endswith(trace["path"]))
        for name in "method", "key", "req", "status", "resp":
            # As text, since 1 == 1.0 == True.
            self.assertEqual(json.dumps(trace[name], sort_keys=True),
                             json.dumps(row[name], sort_keys=True))

    def test_a_misbehaving_shop_is_tried_again_only_where_it_may_pass(self):
        for (name, _, statuses, code), keys, (done, rows, seen) \
                in self.misbehaved:
            with self.subTest(name):
                hops = [row for row in rows if row["key"]]
                self.assertEqual([row["status"] for row in hops], statuses)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(len(set(keys)), 1)
                self.assertEqual({row["key"] for row in hops}, set(keys))
                self.check_always(done, rows, seen)
                if statuses[-1] is None:
                    self.assertEqual(len(seen), 1, "a word after silence")

    def test_what_a_shop_says_is_kept_as_it_came(self):
        table = [  # the bytes of a 404, and what the row says
            (b"<html>", "<html>"), (b"", None), (b"\xff{", "\ufffd{"),
            (b'{"a": NaN}', '{"a": NaN}'), (b'{"a": 1e999}', '{"a": 1e999}'),
            (b'{"a": 1.0}', {"a": 1.0}), (b"null", None),
            (b"[" * 50000, "[" * 50000),
            (b"x" * 300000, "x" * (256 * 1024))]
        for body, kept in table:
            with self.subTest(body[:20]):
                with kit.serve(talker(gives(404, body))) as shop:
                    done, rows, seen = place(
                        f"http://127.0.0.1:{shop.port}", ORDERS)
                self.assertEqual(json.dumps(rows[1]["resp"]),
                                 json.dumps(kept))
                self.check_always(done, rows, seen)

    def test_it_does_not_start_with_a_setting_that_cannot_be_used(self):
        fine = dict(STUB_URL="http://127.0.0.1:9", MODEL_NAME="any",
                    MODEL_BASE_URL="http://127.0.0.1:9")
        table = [  # what is different, arguments, what is named
            (dict(STUB_URL=""), [], "STUB_URL"),
            (dict(MODEL_BASE_URL=""), [], "MODEL_BASE_URL"),
            (dict(MODEL_NAME=""), [], "MODEL_NAME"),
            (dict(STUB_URL="ftp://x"), [], "STUB_URL"),
            (dict(STUB_URL="http://"), [], "STUB_URL"),
            (dict(STUB_URL="http://:80"), [], "STUB_URL"),
            (dict(STUB_URL="127.0.0.1:8080"), [], "STUB_URL"),
            (dict(STUB_URL="http://a b"), [], "STUB_URL"),
            (dict(STUB_URL="http://u:p@x"), [], "STUB_URL"),
            (dict(STUB_URL="http://x/?a=b"), [], "STUB_URL"),
            (dict(STUB_URL="http://x/#a"), [], "STUB_URL"),
            (dict(MODEL_BASE_URL="http://x/\x1b[2J"), [], "MODEL_BASE_URL"),
            (dict(MODEL_API_KEY="a\nb: c"), [], "MODEL_API_KEY"),
            (dict(TIMEOUT="soon"), [], "TIMEOUT"),
            (dict(REPLAY="."), [], "REPLAY"),
            (dict(REPLAY="no/such/folder/x"), [], "REPLAY"),
            ({}, ["one", "two"], "two"),
            ({}, ["--help"], "--help"),
        ]
        for changed, args, named in table:
            with self.subTest(changed=changed, args=args), \
                    tempfile.TemporaryDirectory() as folder:
                done = kit.run("harness.py", *args, cwd=folder,
                               **dict(fine, **changed))
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(done.stdout, "")
                self.assertEqual(len(done.stderr.splitlines()), 1)
                self.assertIn(named, done.stderr)
                self.assertEqual(list(pathlib.Path(folder).iterdir()), [])

    def test_the_base_url_may_end_in_a_slash_or_in_the_path(self):
        for end in "", "/", "/v1", "/v1/", "/chat/completions", \
                "/chat/completions/":
            with self.subTest(end):
                seen = []
                talk = model_of([(200, chat("no"), {})], seen)
                with kit.serve(talk) as model, \
                        tempfile.TemporaryDirectory() as folder:
                    kit.run("harness.py", cwd=folder, MODEL_NAME="any",
                            STUB_URL="http://127.0.0.1:9", MODEL_BASE_URL=(
                                f"http://127.0.0.1:{model.port}{end}"))
                path = end.rstrip("/").replace("/chat/completions", "")
                self.assertEqual(
                    seen[0][0], f"POST {path}/chat/completions HTTP/1.1")
                self.assertNotIn("authorization", seen[0][1])

    def test_a_dripping_answer_ends_with_the_timeout(self):
        (done, rows, took), = self.dripped
        # Three attempts and 4 s between them; the drip takes 20 s each.
        self.assertLess(took, 20)
        self.assertEqual(done.returncode, 1)
        self.assertEqual([row["error"] for row in rows],
                         ["no answer in 1 s"] * 3)
        self.check_always(done, rows, [])

    def test_it_waits_1_and_3_seconds_or_what_retry_after_says(self):
        for (headers, due), waited in self.paused:
            with self.subTest(headers):
                self.assertEqual(len(waited), 2, "three attempts in all")
                for least, real in zip(due, waited):
                    self.assertGreater(real, least - 0.1)
                # A busy machine adds to it, so this is lenient.
                self.assertLess(sum(waited), sum(due) + 3)

    def test_it_waits_30_seconds_at_most(self):
        """As much as a reader has time for: more is an OverflowError."""
        with kit.serve(talker(gives(503, {}, Retry_After="9" * 30))) as \
                shop, self.started(f"http://127.0.0.1:{shop.port}") as run:
            while shop.count < 1:
                time.sleep(0.02)
            with self.assertRaises(subprocess.TimeoutExpired):
                run.wait(0.7)

    @contextlib.contextmanager
    def started(self, model_url, **env):
        """Start the harness in a folder of its own; yield the process."""
        with tempfile.TemporaryDirectory() as folder:
            env = dict(dict(kit.CLEAN, STUB_URL="http://127.0.0.1:9",
                            MODEL_NAME="any", MODEL_BASE_URL=model_url),
                       **env)
            with subprocess.Popen(
                    [sys.executable, str(kit.ROOT / "harness.py")],
                    cwd=folder, env=env, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True) as run:
                run.replay = pathlib.Path(folder, "replay.jsonl")
                try:
                    yield run
                finally:
                    run.kill()

    @unittest.skipIf(os.name == "nt", "Windows has no such signal")
    def test_ctrl_c_between_two_hops_is_one_sentence(self):
        with kit.serve(talker(gives(503, {}, Retry_After="9"))) as shop, \
                self.started(f"http://127.0.0.1:{shop.port}") as run:
            while not (run.replay.exists() and run.replay.read_bytes()):
                time.sleep(0.02)
            time.sleep(0.1)
            run.send_signal(signal.SIGINT)
            out, said = run.communicate(timeout=10)
            self.assertEqual(run.returncode, 1)
            self.assertEqual(said.splitlines()[1:], ["KeyboardInterrupt()"])
            self.assertEqual(json.loads(out)["orders"], [])
            self.assertEqual(len(run.replay.read_text().splitlines()), 1)

    def test_a_model_that_cannot_be_reached_is_three_rows(self):
        for url, (done, rows, _) in self.reached:
            with self.subTest(url):
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertEqual([row["status"] for row in rows], [None] * 3)
                self.check_always(done, rows, [])

    def test_an_error_never_quotes_a_header(self):
        (done, rows, _), = self.echoed
        self.assertEqual(rows[0]["error"], "BadStatusLine")
        self.check_always(done, rows, [])

    def test_what_a_proxy_says_cannot_steer_the_terminal(self):
        (done, rows, _), = self.tunnelled
        self.assertIn("403", rows[0]["error"])
        self.check_always(done, rows, [])

    def test_the_shop_gets_the_order_and_no_api_key(self):
        talk = talker(gives(201, X_Trace_Id="t1"))
        with kit.serve(talk) as shop:
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}/kit/", ORDERS)
        (first, headers, body), = talk.seen
        self.assertEqual(first, "POST /kit/orders HTTP/1.1")
        self.assertEqual(headers["content-type"], "application/json")
        self.assertNotIn("authorization", headers)
        self.assertNotIn("python", headers["user-agent"].lower())
        self.assertEqual(body, {"sku": "sku_light", "qty": 2})
        self.assertEqual(rows[1], {
            "trace_id": "t1", "at": rows[1]["at"], "method": "POST",
            "url": f"http://127.0.0.1:{shop.port}/kit/orders",
            "key": talk.keys[0], "req": body, "status": 201,
            "resp": {"ok": True, "order_id": "ord_0123456789ab"}})
        self.check_always(done, rows, seen)

    def test_what_is_not_exactly_an_order_is_refused_not_repaired(self):
        order = '{"sku": "sku_light", "qty": 2}'
        table = [
            '{"sku": "sku_old", "sku": "sku_light", "qty": 2}',
            '{"sku": "sku_light", "qty": 2, "qty": 2}', order + order,
            order[:-1], "'" + order + "'", json.dumps(order), f"[{order}]",
            '[["sku", "sku_light"], ["qty", 2]]', order.replace("2", "NaN"),
            order.replace("2", "1e999"), order.replace("2", "[" * 50000),
            order + "\ud800", "", " ",
            ["sku", "qty"], {"sku": "sku_light"}, 5, None, True]
        calls = [dict(CALL, id=f"c{number}", function={
            "name": "create_order", "arguments": arguments})
            for number, arguments in enumerate(table)]
        with kit.shop() as shop:
            done, rows, seen = place(f"http://127.0.0.1:{shop.port}", [
                (200, {"choices": [{"message": {"tool_calls": calls}}]}, {}),
                (200, chat("done"), {})])
        answers = seen[1][2]["messages"][2:]
        for arguments, each in zip(table, answers):
            with self.subTest(str(arguments)[:60]):
                self.assertIn("just sku and qty", each["content"])
        self.assertEqual(len(answers), len(table))
        self.assertEqual(json.loads(done.stdout)["orders"], [])
        self.assertEqual(done.returncode, 1)

    def test_what_the_model_is_asked_and_told(self):
        message = {"role": "assistant", "content": None, "hm": [1.0],
                   "tool_calls": [CALL, dict(CALL, id="", x={"y": 1}), {
                       "function": {"name": "cancel_order",
                                    "arguments": "{}"}}, {"id": 7}]}
        with kit.shop() as shop:
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}",
                [(200, {"choices": [{"message": message}]}, {}),
                 (200, chat("done"), {})], MODEL_NAME="a model")
        self.assertEqual(done.returncode, 0, done.stderr)
        for first, headers, body in seen:
            self.assertEqual(first, "POST /v1/chat/completions HTTP/1.1")
            self.assertEqual(headers["content-type"], "application/json")
            self.assertEqual(set(body),
                             {"model", "messages", "tools", "stream"})
            self.assertEqual(body["model"], "a model")
            tool, = body["tools"]
            self.assertEqual(tool["type"], "function")
            self.assertEqual(tool["function"]["name"], "create_order")
            self.assertEqual(
                tool["function"]["parameters"]["properties"],
                {"sku": {"type": "string"}, "qty": {"type": "integer"}})
        self.assertEqual([row["req"] for row in rows if not row["key"]],
                         [body for _, _, body in seen])
        asked, told, *answers = seen[1][2]["messages"]
        self.assertEqual(asked["role"], "user")
        ids = [call["id"] for call in told["tool_calls"]]
        self.assertEqual(len(set(ids)), 4)
        for call, made_up in zip(message["tool_calls"], ids):
            call["id"] = made_up
        self.assertEqual(told, message)
        self.assertEqual((ids[0], ids[3]), ("c1", 7))
        self.assertEqual([each["tool_call_id"] for each in answers], ids)
        said = [json.loads(each["content"]) for each in answers]
        self.assertEqual(said[:2], [
            {"status": 201, "body": row["resp"]} for row in rows[1:3]])
        for each in said[2:]:
            self.assertEqual(each, {
                "error": "create_order takes just sku and qty"})
        self.assertEqual(json.loads(done.stdout), {
            "final": "done", "replay": "replay.jsonl",
            "orders": [{"order_id": row["resp"]["order_id"], "status": 201,
                        "key": row["key"], "trace_id": row["trace_id"]}
                       for row in rows[1:3]]})
        self.check_always(done, rows, seen)

    def test_the_last_words_name_only_what_the_shop_confirmed(self):
        table = [  # last words, exit
            ("", 0), (None, 0), ("Placed as ord_A-b_9.", 0),
            ([{"type": "text", "text": "**ord_A-b_9**"}], 0),
            ("ord_A-b_8", 1), ("ord_A-b", 1), ("ord_A-b_99", 1),
            ("ord_A-b_9 and ord_C", 1),
            ([{"type": "text", "text": "ord_C"}], 1)]
        for words, code in table:
            with self.subTest(words), kit.serve(talker(gives(
                    201, {"order_id": "ord_A-b_9"}))) as shop:
                done, rows, seen = place(
                    f"http://127.0.0.1:{shop.port}",
                    [ORDERS[0], (200, chat(words), {})])
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(json.loads(done.stdout)["final"], words)
                self.check_always(done, rows, seen)

    def test_tool_calls_that_are_no_list_are_no_calls(self):
        for calls in {"0": CALL}, "create_order", 5, True, None, []:
            last = {"choices": [{"finish_reason": "tool_calls", "message": {
                "content": "done", "tool_calls": calls}}]}
            with self.subTest(calls), kit.serve(talker(gives(201))) as shop:
                done, rows, seen = place(
                    f"http://127.0.0.1:{shop.port}",
                    [ORDERS[0], (200, last, {})])
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(json.loads(done.stdout)["final"], "done")
                self.assertEqual(len(rows), 3)

    def test_a_model_that_calls_for_ever_gets_8_turns(self):
        talk = talker(gives(201))
        with kit.serve(talk) as shop:
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}", ORDERS[:1])
        self.assertEqual((len(seen), len(set(talk.keys))), (8, 8))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(json.loads(done.stdout)["orders"]), 8)
        self.check_always(done, rows, seen)

    def test_odd_model_answers_are_no_traceback(self):
        table = [  # the body of a 200, and what the row keeps
            b"[" * 100000, b"5", b'"x"', b'{"choices": 5}',
            b'{"choices": {"0": 1}}', b'{"choices": [5]}',
            b'{"choices": [{"message": null}]}',
            b'{"choices": [{"message": []}]}',
            b'{"choices": [{"message": {"tool_calls": ["x"]}}]}',
            b'{"choices": [{"message": {"tool_calls": [null]}}]}',
            b"\x1b[2J\x1b]0;x\x07" * 1000]
        for body in table:
            with self.subTest(body[:60]):
                done, rows, seen = place(
                    "http://127.0.0.1:9", [(200, body, {})])
                self.assertEqual(done.returncode, 1)
                self.assertEqual(len(rows), 1)
                self.check_always(done, rows, seen)

    def test_a_model_message_counts_only_in_a_200(self):
        for status in 201, 400:
            done, rows, seen = place("http://127.0.0.1:9", [
                (status, chat(None, CALL), {})])
            self.assertEqual([row["status"] for row in rows], [status])
            self.check_always(done, rows, seen)

    def test_answers_of_any_depth_are_kept_or_text(self):
        """A depth that is parsed but cannot be written is a traceback."""
        self.addCleanup(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(5000)  # for reading the rows here
        deep = [b"[" * each + b"]" * each for each in range(955, 1000)]
        calls = [dict(CALL, id=f"c{number}") for number in range(len(deep))]
        with kit.serve(talker(*[gives(404, body) for body in deep])) as shop:
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}",
                [(200, chat(None, *calls), {}), (200, chat("done"), {})])
        self.assertEqual(len(rows), len(deep) + 2)
        self.check_always(done, rows, seen)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no full device")
    def test_a_full_disk_ends_it_before_the_next_hop(self):
        with kit.serve(model_of(ORDERS, [])) as model, \
                self.started(f"http://127.0.0.1:{model.port}",
                             REPLAY="/dev/full") as run:
            out, said = run.communicate(timeout=20)
            self.assertEqual(run.returncode, 1)
            self.assertEqual(len(said.splitlines()), 1, said)
            self.assertIn("No space left", said)
            self.assertEqual(json.loads(out)["orders"], [])
            self.assertEqual(model.count, 1)

    def test_a_proxy_is_not_asked_for_loopback_but_for_others(self):
        asked = []

        def proxy(link, number):
            asked.append(kit.read_request(link)[0])
            kit.answer(link, 403, {})

        with kit.serve(proxy) as other, kit.shop() as shop:
            proxies = {"http_proxy": f"http://127.0.0.1:{other.port}"}
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}",
                ORDERS, **proxies)
            self.assertEqual((done.returncode, asked), (0, []))
            done, rows, seen = place(
                f"http://localhost:{shop.port}", ORDERS, **proxies)
            self.assertEqual((done.returncode, asked), (0, []))
            place(f"http://127.0.0.1:{shop.port}", [], **dict(
                proxies, MODEL_BASE_URL="http://model.example"))
        self.assertEqual(
            asked, ["POST http://model.example/chat/completions HTTP/1.1"])

    def test_an_error_that_quotes_the_api_key_is_kept_without_it(self):
        done, rows, seen = place("http://127.0.0.1:9", [
            (401, {"error": f"no such key: {API_KEY}"}, {})])
        self.assertEqual(rows[0]["resp"], {"error": "no such key: ***"})
        self.check_always(done, rows, seen)

    def test_what_the_model_says_cannot_steer_the_terminal(self):
        words = "\x1b[2J\x07\x7f\u009b31m done"
        with kit.shop() as shop:
            done, rows, seen = place(f"http://127.0.0.1:{shop.port}", [
                (200, chat(None, CALL), {}), (200, chat(words), {})])
        self.assertEqual(json.loads(done.stdout)["final"], words)
        self.assertEqual(done.returncode, 0)
        self.check_always(done, rows, seen)

    def test_the_prompt_is_the_argument_and_rows_are_appended(self):
        with kit.shop() as shop, tempfile.TemporaryDirectory() as folder, \
                contextlib.ExitStack() as stack:
            seen = []
            model = stack.enter_context(kit.serve(model_of(
                [(200, chat("no"), {})], seen)))
            for prompt in [], ["Order 3 units of x."]:
                done = kit.run(
                    "harness.py", *prompt, cwd=folder, MODEL_NAME="any",
                    STUB_URL=f"http://127.0.0.1:{shop.port}",
                    MODEL_BASE_URL=f"http://127.0.0.1:{model.port}",
                    REPLAY="r.jsonl")
                self.assertEqual(json.loads(done.stdout), {
                    "final": "no", "orders": [], "replay": "r.jsonl"})
            rows = pathlib.Path(folder, "r.jsonl").read_text().splitlines()
        said = [body["messages"][0]["content"] for _, _, body in seen]
        self.assertEqual(
            said, ["Order 2 units of sku_light.", "Order 3 units of x."])
        self.assertEqual(len(rows), 2)


if __name__ == "__main__":
    unittest.main()
