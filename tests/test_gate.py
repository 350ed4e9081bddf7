"""The gate: no model before a test was seen to fail."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import kit

FIXTURE = "invoices.py", "test_invoices.py", "sample.csv"
HAS_PYTEST = subprocess.run(
    [sys.executable, "-m", "pytest", "--version"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


@unittest.skipUnless(HAS_PYTEST, "the gate needs pytest 6.2 or newer")
class Gate(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)
        shutil.copytree(kit.ROOT / "invoices", self.home / "invoices",
                        ignore=shutil.ignore_patterns("__pycache__"))

    def gate(self, verb, status, said, **env):
        done = kit.run("gate.py", verb, cwd=self.home, **env)
        self.assertNotIn("Traceback (most", done.stderr)
        self.assertIn(said, done.stdout + done.stderr)
        self.assertEqual(done.returncode, status)
        return done

    def write(self, name, text):
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def fix(self, how):
        path = self.home / "invoices" / "invoices.py"
        path.write_text(path.read_text().replace('abs(int(row["cents"]))',
                                                 how))

    def test_the_exercise_from_red_to_green(self):
        done = self.gate("red", 0, "red captured")
        self.assertRegex(done.stdout, "FAILED .*assert 1700 == 1500")
        self.write("invoices/test_invoices.py", (
            self.home / "invoices" / "test_invoices.py").read_text()
            .replace("1500", "1300"))
        self.write("artifacts/prompt.txt", "Why 1700?")
        self.gate("model", 1, "The fixture changed since red. "
                              "Run red again.")
        self.gate("red", 0, "red captured")
        self.gate("model", 0, "model window open")
        self.gate("red", 1, "The model window is open. "
                            "Red is already on record.")
        self.gate("model", 1, "The model window is open. "
                              "Red is already on record.")
        self.gate("green", 1, "still red")
        self.fix('int(row["cents"])')
        self.gate("green", 0, "green captured")
        log = (self.home / "artifacts" / "red.log").read_text()
        self.assertEqual(len(re.findall("^# red ", log, re.M)), 2)
        if shutil.which("sha256sum"):
            subprocess.run(["sha256sum", "-c", "--strict", "--quiet",
                            "artifacts/model_allowed.at"],
                           cwd=self.home, check=True)
        self.write("artifacts/prompt.txt", "Something else")
        self.gate("green", 1, "prompt.txt changed after the window opened.")

    def test_the_trap_is_green_at_1500(self):
        self.gate("red", 0, "red captured")
        self.write("artifacts/prompt.txt", "Why?")
        self.gate("model", 0, "model window open")
        self.fix('max(0, int(row["cents"]))')
        self.gate("green", 0, "green captured")

    def test_out_of_order_is_told_at_once(self):
        self.gate("model", 1, "No red log. The model waits.")
        self.gate("green", 1, "Green before model is a skip, not a pass.")
        self.gate("blue", 2, "usage: python gate.py red|model|green")
        self.gate("red", 0, "red captured")
        self.gate("model", 1, "Write artifacts/prompt.txt first.")
        self.write("artifacts/prompt.txt", " \n")
        self.gate("model", 1, "Write artifacts/prompt.txt first.")

    def test_a_run_that_is_not_red_leaves_no_log(self):
        broken = "That is a broken run, not a failing test."
        green = "red.log is green. The gate wants a failure."
        table = [  # what the test file holds, what is said
            ("import nothing  # FAILED", broken),
            ("def test_a(:", broken),
            ("", broken),
            ("import pytest\n@pytest.fixture\ndef f(): assert 0\n"
             "def test_a(f): pass", broken),
            ("def test_a(): print('FAILED')", green),
            ("import os\ndef test_a(): os._exit(1)", broken),
            ("import pytest\ndef test_a(): pytest.exit('FAILED', 1)",
             broken),
            ("def test_a(): raise KeyboardInterrupt", broken),
            ("import time\ndef test_a(): time.sleep(60)", broken)]
        for text, said in table:
            with self.subTest(text):
                self.write("invoices/test_invoices.py", text + "\n")
                self.gate("red", 1, said, TIMEOUT="4")
                self.assertFalse(
                    (self.home / "artifacts" / "red.log").exists())

    def test_the_surroundings_do_not_steer_it(self):
        self.write("invoices/conftest.py",
                   "def pytest_collection_modifyitems(items):\n"
                   "    items.clear()\n")
        self.write("pytest.ini", "[pytest]\naddopts = --collect-only\n")
        self.gate("red", 0, "red captured",
                  PYTEST_ADDOPTS="--collect-only", PYTEST_PLUGINS="nope")

    def test_three_files_side_by_side_will_do(self):
        for name in FIXTURE:
            shutil.move(str(self.home / "invoices" / name), str(self.home))
        (self.home / "invoices").rmdir()
        self.gate("red", 0, "red captured")


if __name__ == "__main__":
    unittest.main()
