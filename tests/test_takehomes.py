"""The grader: honest take-homes are complete, forged ones are not."""
import json
import pathlib
import re
import tempfile
import unittest

import kit

ORDER = {"sku": "sku_light", "qty": 2}


class TakeHomes(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "replay.jsonl")

    def rows(self, port):
        """Return an honest file's rows: order, replay, conflict."""
        call = {"id": "c1", "function": {
            "name": "create_order", "arguments": json.dumps(ORDER)}}
        model = {"method": "POST", "url": "http://m/v1/chat/completions",
                 "trace_id": None, "key": None, "status": 200, "req": {},
                 "resp": {"choices": [{"message": {
                     "content": None, "tool_calls": [call]}}]}}
        rows = [model]
        for qty in 2, 2, 3:
            req = dict(ORDER, qty=qty)
            status, resp, headers = kit.ask(
                port, "POST", "/orders", req, key="key")
            rows.append({
                "trace_id": headers["X-Trace-Id"], "method": "POST",
                "url": f"http://127.0.0.1:{port}/orders", "key": "key",
                "req": req, "status": status, "resp": resp})
        words = f"Placed {rows[1]['resp']['order_id']}."
        rows.append(dict(model, resp={"choices": [
            {"message": {"content": words}}]}))
        return rows

    def grade(self, rows, port, *args):
        """Return the three answers, the exit status and the output."""
        if not isinstance(rows, bytes):
            rows = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.path.write_bytes(rows)
        done = kit.run("grade.py", self.path, f"http://127.0.0.1:{port}",
                       *args)
        self.assertEqual(done.stderr, "")
        self.assertNotRegex(done.stdout, r"[^\n -~]")
        answers = " ".join(re.findall(
            r"^(?:tool call|idempotency|wire) +(yes|no|\?) ",
            done.stdout, re.MULTILINE))
        verdict = {0: "complete", 1: "incomplete", 3: "not gradable"}
        self.assertEqual(done.stdout.splitlines()[-1],
                         f"verdict: {verdict[done.returncode]}")
        return answers, done.stdout

    def test_honest_files_are_complete_in_any_form(self):
        with kit.shop() as shop:
            rows = self.rows(shop.port)
            text = "\n".join(map(json.dumps, rows)).encode()
            lost = dict(rows[1], status=None, resp=None, trace_id=None,
                        error="lost")
            table = [
                rows, text, b"\xef\xbb\xbf" + text + b"\n\n",
                text.replace(b"\n", b"\r\n\r\n"), rows[:2],
                [rows[0], lost, rows[2]]]
            for form in table:
                with self.subTest(str(form)[:40]):
                    answers, said = self.grade(form, shop.port, "--rows", 9)
                    self.assertEqual(answers, "yes yes yes", said)
                    self.assertIn("  match\n", said)

    def test_forged_files_are_told_which_question_says_no(self):
        with kit.shop() as shop:
            rows = self.rows(shop.port)
            model, first, again, conflict, words = rows
            text = "\n".join(map(json.dumps, rows)).encode()
            named = dict(words, resp={"choices": [
                {"message": {"content": "Placed ord_deadbeef."}}]})
            table = [  # rows, the three answers
                (rows[1:4], "no yes yes"),
                ([words, first], "no yes yes"),
                ([first, model], "no yes yes"),
                ([model, dict(first, key="other")] + rows[2:], "no"),
                ([model, first, named], "no yes yes"),
                ([model, dict(first, key=None)], "no"),
                ([model, dict(first, status=200)], "yes yes no"),
                ([model, dict(first, req=dict(ORDER, qty=3))], "no yes no"),
                ([model, dict(first, trace_id=None)], "yes yes no"),
                ([model, dict(first, trace_id="../orders/x")],
                 "yes yes no"),
                ([model, first, dict(again, trace_id=first["trace_id"])],
                 "yes yes no"),
                ([model, words], "no yes no"),
                (b"", "no yes no"), (b"prose\n", "no yes no"),
                (text[:-9], "yes yes no"),
                (b"[1]\n" + text, "yes yes no"),
                (b'{"a": 1, "a": 2}\n' + text, "yes yes no"),
                (text + b"\n\xff\n", "yes yes no")]
            for form, due in table:
                with self.subTest(str(form)[:60]):
                    answers, said = self.grade(form, shop.port, "--rows", 9)
                    self.assertRegex(answers, f"^{due}", said)
                    self.assertIn("verdict: incomplete", said)

    def test_a_shop_that_is_down_or_empty_is_not_a_fail(self):
        with kit.shop() as shop:
            rows = self.rows(shop.port)
        self.assertEqual(self.grade(rows, shop.port)[0], "yes ? ?")
        with kit.shop() as other:
            answers, said = self.grade(rows, other.port)
        self.assertEqual(answers, "yes yes ?")
        self.assertIn("verdict: not gradable", said)
        self.assertIn(f"note: not every row was recorded against "
                      f"127.0.0.1:{other.port}", said)

    def test_a_shop_that_places_every_order_anew_is_found(self):
        def cheat(link, number):
            first, headers, body = kit.read_request(link)
            kit.answer(link, 201, {"ok": True, "order_id": f"ord_{number}"},
                       X_Trace_Id=f"t{number}")

        with kit.shop() as shop:
            rows = self.rows(shop.port)
            with kit.serve(cheat) as other:
                answers = self.grade(rows, other.port)[0]
        self.assertEqual(answers, "yes no no")

    def test_odd_answers_are_no_or_a_question_mark(self):
        def talk(link, number):
            kit.read_request(link)
            odd[0](link)

        head = b"HTTP/1.1 201 OK\r\nX-Trace-Id: a\r\nContent-Length: "
        odds = [
            lambda link: link.sendall(b"SSH-2.0-x\r\n"),
            lambda link: link.sendall(b"HTTP/1.1 201 OK\r\n"
                                      + b"A: b\r\n" * 300 + b"\r\n"),
            lambda link: kit.answer(link, 201, b"[" * 50000),
            lambda link: kit.answer(link, 201, b"9" * 6000),
            lambda link: kit.answer(link, 201, {"a": "\x1b[2J\x7f" * 99999}),
            lambda link: kit.answer(link, 201, b'"\\ud800"'),
            lambda link: kit.answer(link, 302, {}, Location="/elsewhere"),
            lambda link: link.sendall(head + b"99\r\n\r\n{"),
            lambda link: [link.sendall(head + b"9999999999\r\n\r\n")]
            + [link.sendall(b" " * 65536) for _ in range(999)]]
        with kit.shop() as shop:
            rows = self.rows(shop.port)
        odd = [None]
        with kit.serve(talk) as other:
            for number, odd[0] in enumerate(odds):
                with self.subTest(number):
                    answers, said = self.grade(rows, other.port)
                    self.assertNotIn("yes", answers[4:])
                    self.assertLess(len(said), 6000)

    def test_silence_is_asked_once_for_20_seconds(self):
        def hang(link, number):
            kit.read_request(link)
            link.recv(1)

        with kit.shop() as shop:
            rows = self.rows(shop.port)
        with kit.serve(hang) as other:
            answers, said = self.grade(rows, other.port)
            self.assertEqual(other.count, 1)
        self.assertEqual(answers, "yes ? ?")

    def test_usage_is_2(self):
        self.path.write_text("")
        good = "http://127.0.0.1:9"
        for args in ([], [self.path], [self.path, "ftp://x"],
                     [self.path, "http://u:p@x"], [self.path, "http://x?y"],
                     [self.path, good, "--rows", "0"],
                     [self.path, good, "--row", "2"],
                     [self.path.parent, good], ["no-such-file", good]):
            with self.subTest(args):
                done = kit.run("grade.py", *args)
                self.assertEqual(done.returncode, 2)
                self.assertNotIn("Traceback", done.stderr)

    def test_a_seed_repeats_the_draw_and_each_status_comes_first(self):
        with kit.shop() as shop:
            rows = self.rows(shop.port)
            drawn = [re.findall(r"^row (\d)", self.grade(
                rows, shop.port, "--rows", 3, "--seed", 7)[1],
                re.MULTILINE) for _ in range(2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertEqual(sorted(drawn[0]), ["2", "3", "4"])


if __name__ == "__main__":
    unittest.main()
