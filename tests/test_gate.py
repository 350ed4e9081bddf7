"""The gate: no model before a test was seen to fail."""
import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import venv

import kit

load_tests = kit.beside
FIXTURE = ["sample.csv", "invoices.py", "test_invoices.py"]
RED = "red captured"
OPEN = "model window open"
GREEN = "green captured"
STILL = "still red"
ALL_PASSED = "red.log is green. The gate wants a failure."
BROKEN = "That is a broken run, not a failing test. "
LATE = "The model window is open. Red is already on record."
NO_RED = "No red log. The model waits."
NO_PROMPT = "Write artifacts/prompt.txt first."
CHANGED = "The fixture changed since red. Run red again."
SKIP = "Green before model is a skip, not a pass."
USAGE = "usage: python gate.py red|model|green"
AFTER = " changed after the window opened."
POSIX = os.name == "posix"
HAS_PYTEST = subprocess.run(
    [sys.executable, "-m", "pytest", "--version"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
BUG = 'abs(int(row["cents"]))'
RIGHT = 'int(row["cents"])'
DROPS = 'max(0, int(row["cents"]))'
# Runs that end the same way under red and under green.
FAILS = "def test_a(): assert 1 == 2\n"
PASSES = "def test_a(): pass\n"
FIXTURE_ERROR = ("import pytest\n@pytest.fixture\ndef broken(): 1 / 0\n"
                 "def test_b(broken): pass\n")


class Work:
    """A working folder with a fresh copy of the exercise."""

    def __init__(self, path, flat=False):
        self.path = pathlib.Path(path)
        self.inside = "" if flat else "invoices/"
        for name in FIXTURE:
            self.write(self.inside + name,
                       (kit.ROOT / "invoices" / name).read_bytes())

    def write(self, name, content):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(content)

    def read(self, name):
        return (self.path / name).read_bytes()

    def tests(self, text):
        self.write(self.inside + "test_invoices.py", text)

    def change(self, name, old, new):
        text = self.read(self.inside + name).decode()
        assert old in text, old
        self.write(self.inside + name, text.replace(old, new))

    def files(self):
        return {str(path.relative_to(self.path)): path.read_bytes()
                for path in self.path.rglob("*") if path.is_file()}

    def gate(self, *words, script="gate.py", **env):
        waits = "TIMEOUT" in env
        with contextlib.nullcontext() if waits else kit.BUSY:
            done = kit.run(script, *words, cwd=self.path, **env)
        assert "Traceback (most" not in done.stderr, done.stderr
        assert "Exception ignored" not in done.stderr, done.stderr
        return done

    def says(self, verb, said, **env):
        """Run a verb; check its last words and its exit status."""
        done = self.gate(*verb.split(), **env)
        if said in (RED, OPEN, GREEN):
            status, words = 0, done.stdout
            assert not done.stderr, done.stderr
        else:
            status = 2 if said == USAGE else 1
            words = done.stderr
        last = (words.splitlines() or [""])[-1]
        exact = last.startswith(said) if said == BROKEN else last == said
        assert exact, (said, done.stdout[-3000:], done.stderr)
        assert done.returncode == status, done.returncode
        return done

    def cannot(self, verb, *names, **env):
        """Run a verb that cannot be done: a sentence names the thing."""
        done = self.gate(verb, **env)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        for name in names:
            assert name in done.stderr.replace("\\\\", "/"), done.stderr
        return done

    def open_window(self):
        """Red, prompt and model, without waiting for pytest."""
        self.says("red", RED)
        self.write("artifacts/prompt.txt", "Why 1700?\n")
        self.says("model", OPEN)

    def as_opened(self):
        """Be as an honest red, prompt and model leave a folder."""
        for name, content in opened().items():
            self.write(name, content)


@contextlib.contextmanager
def work(flat=False):
    with tempfile.TemporaryDirectory(prefix="gate test ") as folder:
        yield Work(folder, flat)


@functools.lru_cache(None)
def opened():
    """Open a window once for all who start from one."""
    with work() as here:
        here.open_window()
        return here.files()


def sha(content):
    return hashlib.sha256(content).hexdigest()


def alive(pid):
    """Whether a process runs (one that init has yet to bury does not)."""
    stop = time.monotonic() + 5
    while time.monotonic() < stop:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)],
                               stdout=subprocess.PIPE).stdout.strip()
        if not state or state.startswith(b"Z"):
            return False
        time.sleep(0.1)
    return True


@unittest.skipUnless(HAS_PYTEST, "the gate needs pytest 6.2 or newer")
class Gate(unittest.TestCase):

    def each(self, rows, check):
        """Check every row, a few at a time; name those that fail."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for row, done in [(row, pool.submit(check, *row))
                              for row in rows]:
                with self.subTest(row[0]):
                    done.result()


class TheExercise(Gate):

    def test_the_honest_way_from_red_to_green_in_both_layouts(self):
        def walk(name, flat):
            with work(flat) as here:
                done = here.says("red", RED)
                assert "assert 1700 == 1500" in done.stdout
                here.change("test_invoices.py", "1500", "1300")
                here.says("red", RED)
                here.write("artifacts/prompt.txt", "Why 1700?\n")
                here.says("model", OPEN)
                here.says("green", STILL)
                here.change("invoices.py", BUG, RIGHT)
                here.says("green", GREEN)
        self.each([("in invoices/", False), ("side by side", True)], walk)

    def test_the_trap_is_green_at_1500_and_right_is_1300(self):
        def walk(name, how, said, expected):
            with work() as here:
                here.as_opened()
                here.change("invoices.py", BUG, how)
                if expected:
                    here.change("test_invoices.py", "1500", expected)
                here.says("green", said)
        self.each([("drop the refund", DROPS, GREEN, None),
                   ("right, test as shipped", RIGHT, STILL, None),
                   ("right, right test", RIGHT, GREEN, "1300"),
                   ("drop the refund, right test", DROPS, STILL, "1300")],
                  walk)

    def test_the_folder_holds_three_files(self):
        kept = [path.name for path in (kit.ROOT / "invoices").iterdir()
                if path.name != "__pycache__"]
        self.assertEqual(sorted(kept), sorted(FIXTURE))

    def test_artifacts_are_listed_with_who_writes_them(self):
        text = (kit.ROOT / "artifacts" / "README.md").read_text()
        rows = dict(re.findall(r"^\| `(\S+)` +\| ([\w ]+?) +\|", text,
                               re.MULTILINE))
        gates = ["red.log", "model_allowed.at", "green.log"]
        theirs = ["prompt.txt", "model.md", "refuse.md", "notes.md"]
        self.assertEqual(rows, {
            **dict.fromkeys(gates, "the gate"),
            **dict.fromkeys(theirs, "the candidate")})


class TheOrder(Gate):

    def test_each_verb_waits_for_the_one_before(self):
        with work() as here:
            before = here.files()
            here.says("model", NO_RED)
            here.says("green", SKIP)
            self.assertEqual(here.files(), before)
            here.write("artifacts/red.log", "1 failed, by hand")
            here.says("model", NO_RED)
            here.says("red", RED)
            for blank in "", " \t\r\n", "\ufeff\n", "\u00a0":
                here.write("artifacts/prompt.txt", blank)
                here.says("model", NO_PROMPT)
            (here.path / "artifacts/prompt.txt").unlink()
            here.says("model", NO_PROMPT)
            (here.path / "artifacts/prompt.txt").mkdir()
            here.says("model", NO_PROMPT)
            (here.path / "artifacts/prompt.txt").rmdir()
            here.write("artifacts/prompt.txt", b"\xff\xfe\x00\x1b")
            here.says("green", SKIP)
            here.says("model", OPEN)
            before = here.files()
            here.says("model", LATE)
            here.says("red", LATE)
            here.says("green", STILL)
            self.assertEqual(here.files(), before)

    def test_what_changed_since_the_last_red_wants_another_red(self):
        def walk(name):
            with work() as here:
                here.as_opened()
                (here.path / "artifacts/model_allowed.at").unlink()
                seen = here.read("invoices/" + name)
                here.write("invoices/" + name, seen + b"\n")
                here.says("model", CHANGED)
                here.write("invoices/" + name, seen)
                here.says("model", OPEN)
        self.each([(name,) for name in FIXTURE], walk)

    def test_only_the_last_red_counts(self):
        with work() as here:
            first = here.read("invoices/test_invoices.py")
            here.says("red", RED)
            here.change("test_invoices.py", "1500", "1300")
            here.says("red", RED)
            here.write("artifacts/prompt.txt", "Why?")
            here.write("invoices/test_invoices.py", first)
            here.says("model", CHANGED)
            (here.path / "invoices/test_invoices.py").unlink()
            here.says("model", CHANGED)

    def test_what_the_stamp_names_may_not_change(self):
        with work() as here:
            here.as_opened()
            here.change("invoices.py", BUG, DROPS)
            stamp = here.read("artifacts/model_allowed.at")
            for name in ("artifacts/red.log", "artifacts/prompt.txt",
                         "invoices/sample.csv"):
                said = name.split("/")[1] + AFTER
                with self.subTest(name):
                    kept = here.read(name)
                    here.write(name, kept + b"\n")
                    here.says("green", said)
                    (here.path / name).unlink()
                    here.says("green", said)
                    here.write(name, kept)
            for content in (b"", b"# 2026-11-29T20:03:03Z\n", b"\xff",
                            re.sub(rb"(?m)^\w", b"# ", stamp)):
                with self.subTest(content):
                    here.write("artifacts/model_allowed.at", content)
                    here.says("green", "red.log" + AFTER)
                    here.says("red", LATE)
                    here.says("model", LATE)
            here.write("artifacts/model_allowed.at", stamp)
            here.says("green", GREEN)

    def test_anything_else_is_usage(self):
        with work() as here:
            before = here.files()
            for words in ("", "blue", "red model", "RED", "-h", "red red"):
                with self.subTest(words):
                    here.says(words, USAGE)
            self.assertEqual(here.files(), before)


class Red(Gate):

    def test_only_a_test_that_failed_is_red(self):
        table = [  # name, what is said, the test file
            ("import error that says FAILED", BROKEN,
             "raise ImportError('1 failed FAILED assert 1 == 2')\n"),
            ("syntax error", BROKEN, "def test_a(:\n"),
            ("no tests", BROKEN, "x = 1\n"),
            ("an empty file", BROKEN, ""),
            ("not text", BROKEN, b"\xff\x00\xfe"),
            ("fixture error", BROKEN, FIXTURE_ERROR),
            ("one passes, one errors", BROKEN, PASSES + FIXTURE_ERROR),
            ("teardown error", BROKEN,
             "import pytest\n@pytest.fixture\ndef f():\n    yield\n"
             "    1 / 0\ndef test_a(f): pass\n"),
            ("prints FAILED and passes", ALL_PASSED,
             "def test_a(): print('FAILED test_a - 1 failed')\n"),
            ("passes beside a skip", ALL_PASSED,
             PASSES + "import pytest\ndef test_b(): pytest.skip()\n"),
            ("all skipped", BROKEN,
             "import pytest\n@pytest.mark.skip\n" + FAILS),
            ("os._exit(1)", BROKEN,
             "import os\ndef test_a(): os._exit(1)\n"),
            ("os._exit(0)", BROKEN,
             "import os\ndef test_a(): os._exit(0)\n"),
            ("passes, then os._exit(1) at exit", BROKEN,
             "import atexit, os\natexit.register(os._exit, 1)\n" + PASSES),
            ("fails, then os._exit(0) at exit", BROKEN,
             "import atexit, os\natexit.register(os._exit, 0)\n" + FAILS),
            ("pytest.exit('FAILED', 1)", BROKEN,
             "import pytest\ndef test_a(): pytest.exit('FAILED', 1)\n"),
            ("Ctrl-C in a test", BROKEN,
             FAILS + "def test_b(): raise KeyboardInterrupt\n"),
            ("a crash", BROKEN,
             "import os\ndef test_a(): os.kill(os.getpid(), 9)\n"),
            ("hangs after a failure", BROKEN,
             FAILS + "import time\ndef test_b(): time.sleep(60)\n"),
            ("an empty report", BROKEN,
             "import os\ndef test_a():\n    open('report.xml', 'w')\n"
             "    os._exit(1)\n"),
            ("a report that is rubbish", BROKEN,
             "import os\ndef test_a():\n    with open('report.xml', 'wb')"
             " as f:\n        f.write(b'<testsuite \\xff failures=\"1\">')\n"
             "    os._exit(1)\n"),
            ("fails", RED, FAILS),
            ("fails beside an error", RED, FAILS + FIXTURE_ERROR),
            ("xfail does not hide it", RED,
             "import pytest\n@pytest.mark.xfail\n" + FAILS),
            ("strict xfail does not fake it", ALL_PASSED,
             "import pytest\n@pytest.mark.xfail(strict=True)\n" + PASSES)]

        def walk(name, said, tests):
            with work() as here:
                here.write("artifacts/red.log", b"kept")
                here.tests(tests)
                slow = {"TIMEOUT": "4"} if "hangs" in name else {}
                here.says("red", said, **slow)
                log = here.read("artifacts/red.log")
                assert (log == b"kept") == (said != RED), log
        self.each(table, walk)

    def test_nothing_around_it_steers_a_run(self):
        clear = "def pytest_collection_modifyitems(items): items.clear()\n"
        away = "import os\nos._exit(0)\n"
        options = "addopts = --collect-only\n"
        table = [  # name, files, environment
            ("conftest.py", {"conftest.py": clear,
                             "invoices/conftest.py": clear}, {}),
            ("pytest.ini", {"pytest.ini": "[pytest]\n" + options,
                            "invoices/pytest.ini": "[pytest]\n" + options},
             {}),
            ("tox.ini, setup.cfg", {"tox.ini": "[pytest]\n" + options,
                                    "setup.cfg":
                                    "[tool:pytest]\n" + options}, {}),
            ("pyproject.toml", {
                "pyproject.toml": "[tool.pytest.ini_options]\n"
                'addopts = "--collect-only"\n'}, {}),
            ("in the temporary folder", {
                "tmp/conftest.py": away, "tmp/pytest.ini":
                "[pytest]\n" + options, "tmp/json.py": away},
             {"TMPDIR": "tmp", "TEMP": "tmp", "TMP": "tmp"}),
            ("modules beside the fixture", {
                "invoices/pytest.py": away, "invoices/json.py": away,
                "pytest.py": away, "json.py": away,
                "invoices/__init__.py": away,
                "invoices/invoices/__init__.py": away}, {}),
            ("tests in subfolders", {
                "invoices/more/test_more.py": away,
                "invoices/test_more.py": away}, {}),
            ("PYTEST_ADDOPTS", {}, {"PYTEST_ADDOPTS": "--collect-only"}),
            ("PYTEST_PLUGINS", {"evil/away.py": away},
             {"PYTEST_PLUGINS": "away", "PYTHONPATH": "evil"}),
            ("PYTHONPATH", {"evil/invoices.py": away,
                            "evil/pytest.py": away},
             {"PYTHONPATH": "evil"}),
            ("PYTHONOPTIMIZE", {}, {"PYTHONOPTIMIZE": "2"}),
            ("PYTHONWARNINGS", {}, {"PYTHONWARNINGS": "error"}),
            ("colours", {}, {"FORCE_COLOR": "1", "PY_COLORS": "1"}),
            ("a narrow terminal", {}, {"COLUMNS": "40"}),
            ("ASCII output", {}, {"PYTHONIOENCODING": "ascii",
                                  "LC_ALL": "C"})]

        def walk(name, files, env):
            with work() as here:
                for path, text in files.items():
                    here.write(path, text)
                env = {key: str(here.path / value)
                       if (here.path / value).is_dir() else value
                       for key, value in env.items()}
                here.says("red", RED, **env)
                log = here.read("artifacts/red.log")
                assert (b"FAILED invoices/test_invoices.py::"
                        b"test_charges_only - AssertionError: assert "
                        b"1700 == 1500") in log.replace(b"\\", b"/"), log
                assert b'failures="1" skipped="0" tests="1"' in log, log
                assert b"\x1b" not in log
        self.each(table, walk)

    def test_modules_beside_three_files_and_the_gate_take_over_nothing(self):
        with work(flat=True) as here:
            shutil.copy(kit.ROOT / "gate.py", here.path)
            for name in "pytest.py", "json.py", "conftest.py", "py.py":
                here.write(name, "import os\nos._exit(0)\n")
            here.says("red", RED, script=here.path / "gate.py")

    def test_an_outcome_does_not_depend_on_old_bytecode(self):
        with work() as here:
            path = here.path / "invoices" / "invoices.py"
            old = path.read_text()
            subprocess.run([sys.executable, "-c", "import invoices"],
                           cwd=path.parent, env=kit.CLEAN, check=True)
            here.open_window()
            seen = path.stat()
            fixed = old.replace(BUG, RIGHT).ljust(len(old), "\n")
            path.write_text(fixed.replace("sum(", "200 + sum("
                                          )[:len(old)])
            os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
            self.assertEqual(path.stat().st_size, seen.st_size)
            here.says("green", GREEN)


class Green(Gate):

    def test_only_tests_that_ran_and_passed_are_green(self):
        table = [  # name, what is said, the test file
            ("fails", STILL, FAILS),
            ("one passes, one fails", STILL,
             PASSES + "def test_b(): assert 0\n"),
            ("all skipped", STILL,
             "import pytest\npytestmark = pytest.mark.skip\n" + PASSES),
            ("skipped as a module", STILL,
             "import pytest\npytest.skip('', allow_module_level=True)\n"),
            ("no tests", STILL, ""),
            ("xfail", STILL, "import pytest\n@pytest.mark.xfail\n" + FAILS),
            ("xfail beside a pass", STILL,
             "import pytest\n@pytest.mark.xfail(run=False)\n" + FAILS
             + "def test_b(): pass\n"),
            ("pytest.xfail()", STILL,
             "import pytest\ndef test_a():\n    pytest.xfail()\n"
             "    assert 0\n"),
            ("expectedFailure", STILL,
             "import unittest\nclass A(unittest.TestCase):\n"
             "    @unittest.expectedFailure\n"
             "    def test_a(self): self.fail()\n"),
            ("os._exit(0) in a test", STILL,
             PASSES + "import os\ndef test_b(): os._exit(0)\n"),
            ("os._exit(0) at import", STILL, "import os\nos._exit(0)\n"),
            ("os._exit(0) at exit", STILL,
             "import atexit, os\natexit.register(os._exit, 0)\n" + FAILS),
            ("one passes, one errors", STILL, PASSES + FIXTURE_ERROR),
            ("an error, then os._exit(0) at exit", STILL,
             "import atexit, os\natexit.register(os._exit, 0)\n" + PASSES
             + FIXTURE_ERROR),
            ("collection error", STILL, "import nothing\n" + PASSES),
            ("prints passed and fails", STILL,
             "def test_a():\n    print('1 passed in 0.01s')\n"
             "    assert 0\n"),
            ("hangs", STILL,
             PASSES + "import time\ndef test_b(): time.sleep(60)\n"),
            ("passes beside a skip", GREEN,
             PASSES + "import pytest\ndef test_b(): pytest.skip()\n"),
            ("xfail that passes", GREEN,
             "import pytest\n@pytest.mark.xfail(strict=True)\n" + PASSES)]

        def walk(name, said, tests):
            with work() as here:
                here.as_opened()
                here.tests(tests)
                slow = {"TIMEOUT": "4"} if name == "hangs" else {}
                here.says("green", said, **slow)
                kept = (here.path / "artifacts/green.log").exists()
                assert kept == (said == GREEN)
        self.each(table, walk)

    def test_a_conftest_does_not_help(self):
        with work() as here:
            here.as_opened()
            here.write("invoices/conftest.py",
                       "import invoices\ninvoices.total = lambda _: 1500")
            here.says("green", STILL)


class TheRecord(Gate):

    def test_a_reviewer_can_check_it_with_sha256sum_and_a_pager(self):
        def walk(name, flat):
            with work(flat) as here:
                inside = here.inside
                before = set(here.files())
                shipped = {name: sha(here.read(inside + name))
                           for name in FIXTURE}
                here.says("red", RED)
                here.says("red", RED)
                here.write("artifacts/prompt.txt", "Why 1700?\n")
                done = here.says("model", OPEN)
                stamp = here.read("artifacts/model_allowed.at")
                assert sha(stamp) in done.stdout
                here.change("invoices.py", BUG, DROPS)
                done = here.says("green", GREEN)
                green = here.read("artifacts/green.log")
                assert sha(green) in done.stdout
                self.check_log(here, here.read("artifacts/red.log"),
                               "red", shipped, 2)
                self.check_log(
                    here, green, "green",
                    dict(shipped, **{"invoices.py": sha(here.read(
                        inside + "invoices.py"))}), 1)
                assert (f"# {sha(stamp)}  artifacts/model_allowed.at\n"
                        .encode() in green)
                self.check_stamp(here, stamp.decode(), shipped)
                assert set(here.files()) - before == {
                    str(pathlib.Path("artifacts", name)) for name in (
                        "red.log", "prompt.txt", "model_allowed.at",
                        "green.log")}
        self.each([("in invoices/", False), ("side by side", True)], walk)

    def check_log(self, here, log, verb, hashes, runs):
        text = log.decode().replace("\r\n", "\n")
        heads = re.findall(
            rf"^# {verb} \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ .*"
            r'failures="\d+".*\n((?:# .*\n)+)=+ test session starts =+$',
            text, re.MULTILINE)
        assert len(heads) == runs, text
        for head in heads:
            for name, known in hashes.items():
                assert f"# {known}  {here.inside}{name}\n" in head, head
        last = "passed" if verb == "green" else "failed"
        ends = re.findall(rf"^=+ 1 {last} in .* =+$", text, re.MULTILINE)
        assert len(ends) == runs, text
        assert text.endswith("=\n")
        assert text.count("\nFAILED ") == (runs if verb == "red" else 0)

    def check_stamp(self, here, stamp, hashes):
        first, *lines = stamp.splitlines()
        assert re.fullmatch(r"# \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
                            "model window opened", first), first
        checked = dict(line.split("  ")[::-1] for line in lines)
        assert checked == {
            "artifacts/red.log": sha(here.read("artifacts/red.log")),
            "artifacts/prompt.txt": sha(b"Why 1700?\n"),
            here.inside + "sample.csv": hashes["sample.csv"],
            here.inside + "invoices.py": "# " + hashes["invoices.py"],
            here.inside + "test_invoices.py":
                "# " + hashes["test_invoices.py"]}, stamp
        for tool in ["sha256sum"], ["shasum", "-a", "256"]:
            if shutil.which(tool[0]):
                subprocess.run(
                    [*tool, "-c", "--strict", "artifacts/model_allowed.at"],
                    cwd=here.path, stdout=subprocess.DEVNULL, check=True)

    def test_it_writes_only_below_artifacts(self):
        with work() as here:
            here.tests("import os\ndef test_a():\n"
                       "    open('junk', 'w').close()\n"
                       "    os.mkdir('artifacts')\n"
                       "    open('artifacts/junk', 'w').close()\n"
                       "    os.chdir('/')\n    assert 0\n")
            before = here.files()
            here.says("red", RED)
            after = here.files()
            log = str(pathlib.Path("artifacts", "red.log"))
            self.assertIn(b"1 failed", after.pop(log))
            self.assertEqual(after, before)

    def test_nothing_stays_in_the_temporary_folder(self):
        with work() as here, tempfile.TemporaryDirectory() as tmp:
            here.says("red", RED, TMPDIR=tmp, TEMP=tmp, TMP=tmp)
            self.assertEqual(os.listdir(tmp), [])

    def test_a_red_after_a_log_without_a_last_newline_counts(self):
        with work() as here:
            here.write("artifacts/red.log", "pasted by hand")
            here.write("artifacts/prompt.txt", "Why?")
            here.says("red", RED)
            here.says("model", OPEN)


class UnderFire(Gate):

    def test_bytes_that_are_no_text_are_kept_and_shown_harmlessly(self):
        tests = ("import os, sys\ndef test_a():\n"
                 "    os.write(1, b'\\xff\\xfe\\x1b[31m\\x07\\0 caf\\xc3"
                 "\\xa9')\n    print('\\udcff \\u20ac')\n"
                 "    assert '\\x1b[2J\\udc80' == 1\n")
        # At import nothing captures what is written to descriptor 1.
        raw = "import os\nos.write(3 - 2, b'\\xff\\x1b[2J\\r\\n')\n"
        with work() as here:
            here.tests(tests + raw)
            done = here.gate("red", PYTHONIOENCODING="ascii")
            self.assertEqual(done.stdout.split("\n")[-2], RED)
            self.assertRegex(done.stdout, r"\A[\n -~]*\Z")

    def test_sixty_megabytes_of_output_make_one_in_the_log(self):
        with work() as here:
            here.tests("def test_a():\n    for _ in range(600):\n"
                       "        print('x' * 99_999)\n    assert 0\n")
            done = here.says("red", RED)
            size = len(here.read("artifacts/red.log"))
            self.assertTrue(2**20 - 4096 < size < 2**20 + 4096, size)
            self.assertLess(len(done.stdout), 2**20 + 4096)
            here.write("artifacts/prompt.txt", "Why?")
            here.says("red", RED)
            here.says("model", OPEN)

    def test_a_child_left_behind_does_not_hold_the_gate(self):
        child = ("import subprocess, sys\ndef test_a():\n"
                 "    child = subprocess.Popen([sys.executable, '-c', "
                 "'import time; time.sleep(20)'], %s)\n"
                 "    print('child', child.pid, 'left')\n    assert 0\n")

        def walk(name, how):
            with work() as here:
                here.tests(child % how)
                start = time.monotonic()
                here.says("red", RED)
                assert time.monotonic() - start < 10
                log = here.read("artifacts/red.log").decode()
                pid = int(re.search(r"child (\d+) left", log).group(1))
                if POSIX and "session" not in how:
                    assert not alive(pid)
        rows = [("in its group", "cwd=None")]
        if POSIX:
            rows.append(("in its own", "start_new_session=True"))
        self.each(rows, walk)

    def test_a_hang_is_stopped_with_its_children(self):
        with work() as here:
            here.tests("import os, subprocess, sys, time\ndef test_a():\n"
                       "    child = subprocess.Popen([sys.executable, '-c',"
                       " 'import time; time.sleep(60)'])\n"
                       "    with open(os.environ['PIDS'], 'w') as pids:\n"
                       "        print(os.getpid(), child.pid, file=pids)\n"
                       "    time.sleep(60)\n")
            start = time.monotonic()
            done = here.says("red", BROKEN, TIMEOUT="3",
                             PIDS=str(here.path / "pids"))
            self.assertLess(time.monotonic() - start, 15)
            self.assertIn("no end in 3 s", done.stderr)
            if POSIX:
                for pid in here.read("pids").split():
                    self.assertFalse(alive(int(pid)))

    @unittest.skipUnless(POSIX, "Windows has no way to send one Ctrl-C")
    def test_ctrl_c_ends_it_with_a_sentence_and_its_children(self):
        with work() as here:
            here.tests("import os, time\ndef test_a():\n"
                       "    with open(os.environ['PIDS'], 'w') as pids:\n"
                       "        print(os.getpid(), file=pids)\n"
                       "    time.sleep(60)\n")
            pids = here.path / "pids"
            with tempfile.TemporaryDirectory() as tmp:
                gate = subprocess.Popen(
                    [sys.executable, str(kit.ROOT / "gate.py"), "red"],
                    cwd=here.path, stdout=subprocess.PIPE, text=True,
                    stderr=subprocess.PIPE,
                    env=dict(kit.CLEAN, PIDS=str(pids), TMPDIR=tmp))
                stop = time.monotonic() + 30
                while time.monotonic() < stop and not (
                        pids.exists() and pids.read_bytes()):
                    time.sleep(0.05)
                gate.send_signal(signal.SIGINT)
                said = gate.communicate(timeout=20)[1]
                self.assertEqual(os.listdir(tmp), [])
            self.assertEqual(said.strip(), "Stopped.")
            self.assertEqual(gate.returncode, 2)
            self.assertFalse(alive(int(pids.read_text())))
            self.assertFalse((here.path / "artifacts").exists())

    def test_what_cannot_be_done_is_one_sentence(self):
        with work() as here:
            for name in FIXTURE:
                with self.subTest("without " + name):
                    kept = here.read("invoices/" + name)
                    (here.path / "invoices" / name).unlink()
                    here.cannot("red", "invoices/" + name)
                    here.write("invoices/" + name, kept)
            for bad in "abc", "1.5", "9" * 500 + "x", "ten":
                with self.subTest(bad):
                    here.cannot("red", "TIMEOUT", TIMEOUT=bad)
            here.write("artifacts", "a file")
            here.cannot("red", "artifacts")
            here.says("model", NO_RED)
            here.says("green", SKIP)
            (here.path / "artifacts").unlink()
            (here.path / "artifacts/red.log").mkdir(parents=True)
            here.cannot("red", "artifacts/red.log")
            here.says("model", NO_RED)
            (here.path / "artifacts/red.log").rmdir()
            here.open_window()
            here.change("invoices.py", BUG, DROPS)
            (here.path / "artifacts/green.log").mkdir()
            here.cannot("green", "artifacts/green.log")

    @unittest.skipUnless(POSIX, "symbolic links need a right on Windows")
    def test_a_link_that_leads_nowhere_is_one_sentence(self):
        with work() as here:
            (here.path / "artifacts").mkdir()
            (here.path / "artifacts/red.log").symlink_to("red.log")
            here.cannot("red", "artifacts/red.log")
            here.says("model", NO_RED)
            (here.path / "artifacts/red.log").unlink()
            here.says("red", RED)
            here.write("artifacts/prompt.txt", "Why?")
            (here.path / "artifacts/model_allowed.at").symlink_to("elsewhere")
            here.cannot("model", "artifacts/model_allowed.at")

    def test_a_folder_that_is_read_only_is_one_sentence(self):
        with work() as here:
            (here.path / "artifacts").mkdir()
            (here.path / "artifacts").chmod(0o500)
            if POSIX and os.geteuid():  # root may write anything
                here.cannot("red", "artifacts/red.log")
            (here.path / "artifacts").chmod(0o700)
            here.says("red", RED)
            (here.path / "artifacts/red.log").chmod(0o400)
            if not POSIX or os.geteuid():
                here.cannot("red", "artifacts/red.log")
            (here.path / "artifacts/red.log").chmod(0o600)

    def test_a_python_without_a_fit_pytest_is_told_so(self):
        with tempfile.TemporaryDirectory() as folder, work() as here:
            venv.create(folder, symlinks=POSIX)
            python = next(path for path in pathlib.Path(folder).glob(
                "[bS]*/python*") if path.stem == "python")
            site = pathlib.Path(subprocess.run(
                [str(python), "-c", "import sysconfig; "
                 "print(sysconfig.get_path('purelib'))"], text=True,
                stdout=subprocess.PIPE, check=True).stdout.strip())

            def red():
                return subprocess.run(
                    [str(python), str(kit.ROOT / "gate.py"), "red"],
                    cwd=here.path, env=kit.CLEAN, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)

            done = red()
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr, r"\A.* has no pytest 6\.2\.\n\Z")
            # From here on the venv shares the pytest of the tests.
            paths = subprocess.run(
                [sys.executable, "-c", "import sys; "
                 "print(*filter(None, sys.path), sep='\\n')"], text=True,
                env=kit.CLEAN, stdout=subprocess.PIPE, check=True).stdout
            (site / "shared.pth").write_text(paths)
            (site / "away-1.dist-info").mkdir()
            (site / "away-1.dist-info/METADATA").write_text(
                "Metadata-Version: 2.1\nName: away\nVersion: 1\n")
            (site / "away-1.dist-info/entry_points.txt").write_text(
                "[pytest11]\naway = away\n")
            (site / "away.py").write_text("import os\nos._exit(0)\n")
            with self.subTest("an installed plugin that would end it"):
                done = red()
                self.assertEqual(done.returncode, 0, done.stderr)
            (site / "sitecustomize.py").write_text(
                "import pytest\npytest.__version__ = '6.1.2'\n")
            with self.subTest("an old pytest"):
                done = red()
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(done.stderr,
                                 r"\A.* has no pytest 6\.2\.\n\Z")

    def test_a_run_gets_nothing_to_read(self):
        with work() as here:
            here.tests("import atexit, os\n"
                       "atexit.register(os.read, 0, 1)\n" + FAILS)
            with subprocess.Popen(
                    [sys.executable, str(kit.ROOT / "gate.py"), "red"],
                    cwd=here.path, env=dict(kit.CLEAN, TIMEOUT="6"),
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL) as gate:
                self.assertEqual(gate.wait(30), 0)


if __name__ == "__main__":
    unittest.main()
