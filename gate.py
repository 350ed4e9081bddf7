#!/usr/bin/env python3
"""Open the model only after a test was seen to fail.

    python3 gate.py red     a failing run goes to artifacts/red.log
    python3 gate.py model   writes artifacts/model_allowed.at, once
    python3 gate.py green   a passing run goes to artifacts/green.log

Run it beside invoices/, with a Python that has pytest 6.2 or newer.
pytest gets a copy of the three fixture files and nothing else. TIMEOUT
(120) is seconds. Exits with 0 done, 1 refused, 2 could not be done.
"""
import atexit
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ART = pathlib.Path("artifacts")
RED = ART / "red.log"
PROMPT = ART / "prompt.txt"
STAMP = ART / "model_allowed.at"
GREEN = ART / "green.log"
HOME = pathlib.Path("invoices" if os.path.isdir("invoices") else "")
DATA = HOME / "sample.csv"
CODE = [HOME / "invoices.py", HOME / "test_invoices.py"]
MAX_LOG = 1024 * 1024  # bytes kept of a run
NOW = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
TIMEOUT = os.getenv("TIMEOUT") or "120"
PYTEST = (sys.executable, "-m", "pytest", str(CODE[1]), "--runxfail",
          "--color=no", "-c", "gate.ini", "--junitxml=report.xml")
ENV = {name: value for name, value in os.environ.items()
       if not name.startswith(("PYTEST", "PYTHON"))}
ENV.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", COLUMNS="120")
VERSION = ("import pytest; exit([int(part) for part in "
           "pytest.__version__.split('.')[:2]] < [6, 2])")
COUNTS = ('<testsuite name="pytest" errors="(.+?)" failures="(.+?)" '
          'skipped="(.+?)" tests="(.+?)"')


def cannot(sentence):
    print(sentence, file=sys.stderr)
    sys.exit(2)


def read(path):
    """Return a file's bytes; none where there is no file."""
    return path.read_bytes() if path.is_file() else b""


def sums(*paths, mark=""):
    """Return a line for each file, as sha256sum writes it."""
    return "".join(
        f"{mark}{hashlib.sha256(read(path)).hexdigest()}"
        f"  {path.as_posix()}\n" for path in paths)


def pytest(folder, output):
    """Run pytest in a folder; return how it ended."""
    child = subprocess.Popen(
        PYTEST, cwd=folder, env=ENV, stdin=subprocess.DEVNULL,
        stdout=output, stderr=output, start_new_session=True)
    try:
        return f"exit {child.wait(int(TIMEOUT))}"
    except subprocess.TimeoutExpired:
        return f"no end in {TIMEOUT} s"
    finally:
        with contextlib.suppress(OSError):  # nothing left to kill
            getattr(os, "killpg", os.kill)(child.pid, 9)
        child.wait()


def judge(end, report):
    """Return red, green or broken, and why."""
    found = re.search(COUNTS, report)
    if not found:
        return "broken", f"pytest: {end}, no report"
    errors, failures, skipped, tests = found.groups()
    why = (f"pytest: {end}, {tests} tests, {failures} failures, "
           f"{errors} errors, {skipped} skipped")
    if end == "exit 1" and failures != "0":
        return "red", why
    clean = failures == errors == "0" and tests != skipped
    return "green" if clean and end == "exit 0" else "broken", why


def run_tests(log, *also):
    """Judge a run and show it; red.log keeps red, green.log green."""
    hashes = sums(*also, DATA, *CODE, mark="# ")
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / HOME).mkdir(exist_ok=True)
    for path in [DATA] + CODE:
        shutil.copyfile(path, folder / path)
    (folder / "gate.ini").write_text("[pytest]\nminversion = 6.2\n")
    # No pipe: what the tests leave behind would hold it open.
    with tempfile.TemporaryFile() as output:
        end = pytest(folder, output)
        output.seek(0)
        kept = output.read(MAX_LOG)
        report = read(folder / "report.xml").decode(errors="replace")
        if not report and subprocess.call(
                [sys.executable, "-c", VERSION], env=ENV,
                stderr=subprocess.DEVNULL):
            cannot(f"{sys.executable} has no pytest 6.2 or newer.")
    outcome, why = judge(end, report)
    if outcome == log.stem:
        ART.mkdir(exist_ok=True)
        header = f"# {outcome} {NOW} {why}\n{hashes}".encode()
        with log.open("ab") as record:
            record.write(header + kept.rstrip() + b"\n")
    for line in kept.splitlines():
        print(re.sub(rb"[^\t -~]", b"?", line).decode())
    return outcome, why


def red():
    outcome, why = run_tests(RED)
    if outcome == "green":
        sys.exit("red.log is green. The gate wants a failure.")
    if outcome == "broken":
        sys.exit(f"That is a broken run, not a failing test. {why}")
    print("red captured")


def model():
    reds = re.findall(rb"# red .*\n((?:# .{64}  .*\n)+)", read(RED))
    if not reds:
        sys.exit("No red log. The model waits.")
    if not read(PROMPT).decode("utf-8-sig", "replace").strip():
        sys.exit("Write artifacts/prompt.txt first.")
    if reds[-1] != sums(DATA, *CODE, mark="# ").encode():
        sys.exit("The fixture changed since red. Run red again.")
    lines = sums(RED, PROMPT, DATA) + sums(*CODE, mark="# ")
    with STAMP.open("xb") as stamp:
        stamp.write(f"# {NOW} model window opened\n{lines}".encode())
    print(sums(STAMP) + "model window open")


def green():
    if not STAMP.exists():
        sys.exit("Green before model is a skip, not a pass.")
    for path in RED, PROMPT, DATA:
        if sums(path).encode() not in read(STAMP):
            sys.exit(f"{path.name} changed after the window opened.")
    outcome, why = run_tests(GREEN, STAMP)
    if outcome != "green":
        print(why)
        sys.exit("still red")
    print(sums(GREEN) + "green captured")


def main():
    verbs = {"red": red, "model": model, "green": green}
    verb = verbs.get(" ".join(sys.argv[1:]))
    if not verb or not re.fullmatch("[0-9]{1,5}", TIMEOUT):
        cannot("usage: python gate.py red|model|green")
    try:
        if verb != green and STAMP.exists():
            sys.exit("The model window is open. "
                     "Red is already on record.")
        verb()
    except (KeyboardInterrupt, OSError) as err:
        cannot(f"Stopped. {err}")


if __name__ == "__main__":
    main()
