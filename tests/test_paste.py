"""Each script survives a mail, stands alone and keeps to its size."""
import ast
import email
import email.message
import email.policy
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import kit

load_tests = kit.beside
CEILINGS = {  # lines, bytes
    "stub_shop.py": (180, 6800),
    "harness.py": (190, 7200),
    "grade.py": (240, 9200),
    "gate.py": (160, 5800),
}
README = kit.ROOT / "README.md"
# What the packages of the four may be: no more than these, all in the
# standard library of Python 3.8 and of every later one.
LIBRARY = {
    "argparse", "atexit", "collections", "configparser", "contextlib",
    "datetime", "hashlib", "http", "io", "itertools", "json", "os",
    "pathlib", "random", "re", "shlex", "shutil", "signal",
    "socketserver", "subprocess", "sys", "tempfile", "threading", "time",
    "types", "urllib", "uuid", "xml"}


def source(name):
    return (kit.ROOT / name).read_bytes()


def scripts():
    return [(name, source(name).decode("ascii")) for name in CEILINGS]


def mailed(text):
    """Send a text through a mail message, and return what arrives."""
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    message["Subject"] = "the script"
    message.set_content(text, cte="7bit")
    arrived = email.message_from_bytes(
        message.as_bytes(), policy=email.policy.default)
    # On the wire lines end in CRLF, in the reader's editor in LF.
    return arrived.get_content().replace("\r\n", "\n")


class Paste(unittest.TestCase):

    def test_each_script_is_under_its_ceilings(self):
        for name, text in scripts():
            with self.subTest(name):
                lines, size = CEILINGS[name]
                self.assertLessEqual(len(text.splitlines()), lines)
                self.assertLessEqual(len(text), size)

    def test_no_line_is_wider_than_72_or_has_a_tab_or_a_loose_end(self):
        for name, text in scripts():
            with self.subTest(name):
                for line in text.split("\n"):
                    self.assertLessEqual(len(line), 72, line)
                    self.assertEqual(line, line.rstrip())
                    self.assertNotRegex(line, r"[^ -~]")

    def test_no_line_begins_as_a_mailer_would_change_it(self):
        for name, text in scripts():
            with self.subTest(name):
                self.assertNotRegex(text, re.compile("^(From |>|\\.|-- $)",
                                                     re.MULTILINE))
                self.assertTrue(text.endswith("\n"))
                self.assertFalse(text.endswith("\n\n"))

    def test_a_mail_brings_back_the_same_bytes(self):
        for name, text in scripts():
            with self.subTest(name):
                self.assertEqual(mailed(text), text)

    def test_a_mail_quoted_three_deep_brings_back_the_same_bytes(self):
        for name, text in scripts():
            with self.subTest(name):
                quoted = re.sub("^", "> > > ", text[:-1], flags=re.MULTILINE)
                self.assertLessEqual(max(map(len, quoted.split("\n"))), 78)
                arrived = mailed(quoted + "\n")
                self.assertEqual(
                    re.sub("^> > > ", "", arrived, flags=re.MULTILINE), text)

    def test_each_script_parses_as_python_3_8(self):
        for name, text in scripts():
            with self.subTest(name):
                ast.parse(text, feature_version=(3, 8))

    def test_each_script_imports_only_the_standard_library(self):
        for name, text in scripts():
            with self.subTest(name):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ImportFrom):
                        names = [node.module]
                    elif isinstance(node, ast.Import):
                        names = [each.name for each in node.names]
                    else:
                        continue
                    for imported in names:
                        self.assertIn(imported.split(".")[0], LIBRARY)

    def test_no_script_catches_everything(self):
        for name, text in scripts():
            with self.subTest(name):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ExceptHandler):
                        self.assertIsNotNone(node.type)
                        caught = ast.dump(node.type)
                        self.assertNotIn("'Exception'", caught)
                        self.assertNotIn("'BaseException'", caught)

    def test_each_script_runs_on_its_own_from_an_empty_folder(self):
        says = {"stub_shop.py": (1, "PORT"), "harness.py": (2, "STUB_URL"),
                "grade.py": (2, "usage: "), "gate.py": (2, "usage: ")}
        for name, text in scripts():
            with self.subTest(name):
                with tempfile.TemporaryDirectory(suffix=" a b") as folder:
                    path = pathlib.Path(folder, name)
                    path.write_bytes(text.encode())
                    done = subprocess.run(
                        [sys.executable, str(path)], cwd=folder, timeout=30,
                        env=dict(kit.CLEAN, PORT="none"), encoding="utf-8",
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                    status, words = says[name]
                    self.assertEqual(done.returncode, status, done.stdout)
                    self.assertNotIn("Traceback", done.stdout)
                    if name != "stub_shop.py":
                        self.assertIn(words, done.stdout)


class Readme(unittest.TestCase):

    def setUp(self):
        self.text = README.read_text("utf-8")

    def test_it_is_short_and_narrow(self):
        self.assertLessEqual(len(self.text.splitlines()), 150)
        self.assertLessEqual(len(self.text.encode()), 7000)
        for line in self.text.splitlines():
            self.assertLessEqual(len(line), 79, line)

    def test_its_line_counts_are_the_real_ones(self):
        told = re.findall(r"^\| `(\w+\.py)` +\| (\d+) ", self.text,
                          re.MULTILINE)
        real = [(name, str(len(source(name).splitlines())))
                for name, _ in told]
        self.assertEqual(told, real)
        self.assertEqual({name for name, _ in told}, set(CEILINGS))

    def test_the_output_it_shows_is_what_the_demo_prints(self):
        """Values shortened by "..." stand for whatever the demo says."""
        shown = re.search(r"(?:^    \$ python3 grade\.py replay[^\n]*\n)"
                          r"((?:^    .*\n)+)", self.text, re.MULTILINE)[1]
        done = kit.run("tests/demo.py")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        real = done.stdout[done.stdout.index("$ python3 grade.py"):]
        real = real.splitlines()[1:]
        for wanted, line in zip(shown.splitlines(), real):
            pattern = re.escape(wanted[4:]).replace(r"\.\.\.", ".*")
            pattern = re.sub(r"(127\\\.0\\\.0\\\.1:|seed\\ )\d+",
                             r"\1\\d+", pattern)
            pattern = re.sub(r"_trace/\w+\.\*", "_trace/.*", pattern)
            self.assertRegex(line, f"^{pattern}$")
        self.assertEqual(len(shown.splitlines()), len(real))

    def test_its_commands_name_files_that_exist(self):
        for name in re.findall(r"python3 ([\w/]+\.py)", self.text):
            self.assertTrue((kit.ROOT / name).exists(), name)


if __name__ == "__main__":
    unittest.main()
