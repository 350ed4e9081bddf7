"""The harness: one row a hop, nothing repaired, nothing invented."""
import base64
import concurrent.futures
import contextlib
import json
import pathlib
import tempfile
import time
import unittest

import kit

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
        done = kit.run("harness.py", *args, cwd=folder, **settings)
        raw = pathlib.Path(folder, "replay.jsonl").read_text("utf-8")
    done.raw = raw
    return done, [json.loads(line) for line in raw.splitlines()], seen


def talker(*turns):
    """Return a shop's talk: each turn is called with the socket."""
    def talk(link, number):
        first, headers, body = kit.read_request(link)
        talk.keys.append(headers.get("idempotency-key"))
        turns[min(number, len(turns)) - 1](link)
    talk.keys = []
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


class Harness(unittest.TestCase):

    def check_always(self, done, rows, seen):
        """What holds of every run, whatever came back."""
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn(API_KEY, done.raw + done.stdout + done.stderr)
        self.assertNotRegex(done.stdout + done.stderr, r"[^\n -~]")
        out = json.loads(done.stdout)
        self.assertEqual(set(out), {"final", "orders", "replay"})
        for row in rows:
            fields = {"trace_id", "at", "method", "url", "key", "req",
                      "status", "resp"}
            if row["status"] is None:
                fields.add("error")
                self.assertIsNone(row["resp"])
            self.assertEqual(set(row), fields)
            self.assertRegex(row["at"], r"^\d{4}-\d\d-\d\dT[\d:]{8}Z$")
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

    def run_case(self, case):
        answers = []
        for answer in case["answers"]:
            body = answer.get("body", "").encode()
            if "body_base64" in answer:
                body = base64.b64decode(answer["body_base64"])
            answers.append((answer["status"], body, {
                name.replace("-", "_"): value
                for name, value in answer["headers"].items()}))
        with kit.shop() as shop:
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}", answers)
            for row in rows:
                if row["trace_id"]:
                    row["trace"] = kit.ask(
                        shop.port, "GET", f"/_trace/{row['trace_id']}")[1]
        return case, done, rows, seen

    def test_every_reported_model_answer_ends_as_the_contract_says(self):
        cases = [json.loads(line) for line in
                 CASES.read_text("utf-8").splitlines()]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            ended = list(pool.map(self.run_case, cases))
        for case, done, rows, seen in ended:
            with self.subTest(case["case"]):
                self.assertEqual(done.returncode, case["exit"], done.stderr)
                placed = [row for row in rows if row["status"] == 201]
                if case["orders"] is not None:
                    self.assertEqual(len(placed), case["orders"])
                if case["rows"] is not None:
                    self.assertEqual(len(rows), case["rows"])
                for row in rows:
                    trace = row.pop("trace", None)
                    if trace:
                        self.assertEqual(
                            [trace[name] for name in
                             ("method", "key", "req", "status", "resp")],
                            [row[name] for name in
                             ("method", "key", "req", "status", "resp")])
                        self.assertTrue(row["url"].endswith(trace["path"]))
                self.check_always(done, rows, seen)

    def test_a_misbehaving_shop_is_tried_again_only_where_it_may_pass(self):
        page = gives(201, b"<html>")
        table = [  # what the shop does, statuses in the file, exit
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
            ("says 409", [gives(409, {})], [409], 1),
            ("says 400", [gives(400, {})], [400], 1),
            ("says 401", [gives(401, {})], [401], 1),
            ("says 404", [gives(404, {})], [404], 1),
            ("sends elsewhere", [gives(302, {}, Location="/x")], [302], 1),
            ("sends elsewhere, 308", [gives(308, {}, Location="/x")],
             [308], 1),
            ("answers a page", [page], [201], 1),
            ("answers {}", [gives(201, {})], [201], 1),
            ("answers nothing", [gives(201, b"")], [201], 1),
            ("answers a number", [gives(201, b"5")], [201], 1),
            ("greets like SSH", [greet, gives(201)], [None, 201], 0),
            ("sends 300 headers", [shout, gives(201)], [None, 201], 0),
        ]
        answers = [(200, chat(None, CALL), {}), (200, chat("done"), {})]

        def run_row(row):
            talk = talker(*row[1])
            with kit.serve(talk) as shop:
                ended = place(f"http://127.0.0.1:{shop.port}", answers)
            return row, talk.keys, ended

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            ended = list(pool.map(run_row, table))
        for (name, _, statuses, code), keys, (done, rows, seen) in ended:
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
        answers = [(200, chat(None, CALL), {}), (200, chat("done"), {})]
        for body, kept in table:
            with self.subTest(body[:20]):
                with kit.serve(talker(gives(404, body))) as shop:
                    done, rows, seen = place(
                        f"http://127.0.0.1:{shop.port}", answers)
                self.assertEqual(rows[1]["resp"], kept)
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
        def drip(link, number):
            kit.read_request(link)
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                link.sendall(b" ")
                time.sleep(0.2)

        start = time.monotonic()
        with kit.serve(drip) as model, \
                tempfile.TemporaryDirectory() as folder:
            done = kit.run("harness.py", cwd=folder, TIMEOUT="1",
                           STUB_URL="http://127.0.0.1:9", MODEL_NAME="any",
                           MODEL_BASE_URL=f"http://127.0.0.1:{model.port}")
        self.assertLess(time.monotonic() - start, 10)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no answer in 1 s", done.stderr)

    def test_a_proxy_is_not_asked_for_loopback_but_for_others(self):
        asked = []

        def proxy(link, number):
            asked.append(kit.read_request(link)[0])
            kit.answer(link, 403, {})

        with kit.serve(proxy) as other, kit.shop() as shop:
            proxies = {"http_proxy": f"http://127.0.0.1:{other.port}"}
            done, rows, seen = place(
                f"http://127.0.0.1:{shop.port}",
                [(200, chat(None, CALL), {}), (200, chat("done"), {})],
                **proxies)
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
                kit.run("harness.py", *prompt, cwd=folder,
                        STUB_URL=f"http://127.0.0.1:{shop.port}",
                        MODEL_BASE_URL=f"http://127.0.0.1:{model.port}",
                        MODEL_NAME="any", REPLAY="r.jsonl")
            rows = pathlib.Path(folder, "r.jsonl").read_text().splitlines()
        said = [body["messages"][0]["content"] for _, _, body in seen]
        self.assertEqual(
            said, ["Order 2 units of sku_light.", "Order 3 units of x."])
        self.assertEqual(len(rows), 2)


if __name__ == "__main__":
    unittest.main()
