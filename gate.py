#!/usr/bin/env python3
"""Open the model only after a test was seen to fail.

    python3 gate.py red     a failing run goes to artifacts/red.log
    python3 gate.py model   writes artifacts/model_allowed.at, once
    python3 gate.py green   a passing run goes to artifacts/green.log

Run it beside invoices/, with a Python that has pytest 6.2 or newer.
pytest gets a copy of the three fixture files and nothing else. TIMEOUT
(120) is seconds. Exits with 0 done, 1 refused, 2 unable.
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
CODE = (HOME / "invoices.py", HOME / "test_invoices.py")
OPEN = "The model window is open. Red is already on record."
NOW = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
TIMEOUT = os.getenv("TIMEOUT") or "120"
PYTEST = (sys.executable, "-m", "pytest", str(CODE[1]), "--runxfail",
          "--color=no", "-c", "gate.ini", "--junitxml=report.xml")
ENV = {k: v for k, v in os.environ.items()
       if k[:6] not in ("PYTEST", "PYTHON")}
ENV.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", COLUMNS="120")


def read(path):
    """Return a file's bytes; none where there is no file."""
    return path.read_bytes() if path.is_file() else b""


def sums(*paths, mark=""):
    """Return lines as sha256sum writes them."""
    return "".join(
        f"{mark}{hashlib.sha256(read(path)).hexdigest()}"
        f"  {path.as_posix()}\n" for path in paths)


def pytest(folder, output, *more):
    """Run pytest in a folder; return how it ended."""
    child = subprocess.Popen(
        PYTEST + more, cwd=folder, env=ENV, stdin=subprocess.DEVNULL,
        stdout=output, stderr=output, start_new_session=True)
    try:
        return f"exit {child.wait(int(TIMEOUT))}"
    except subprocess.TimeoutExpired:
        return f"no end in {TIMEOUT} s"
    finally:
        with contextlib.suppress(OSError):  # nobody left
            getattr(os, "killpg", os.kill)(child.pid, 9)
        child.wait()


def judge(end, report):
    """Return red, green or broken, and why."""
    counts, errors, failures, skipped, tests = re.search(
        r'<testsuite name="pytest" (errors="(\d+)" failures="(\d+)"'
        r' skipped="(\d+)" tests="(\d+)")|$', report).groups()
    failed = end == "exit 1" and failures not in (None, "0")
    passed = (end == "exit 0" and errors == failures == "0"
              and skipped != tests)
    outcome = "red" if failed else "green" if passed else "broken"
    return outcome, f"{end}, {counts or 'no report'}"


def run_tests(log, *also):
    """Judge a run and show it; red.log keeps red, green.log green."""
    hashes = sums(*also, DATA, *CODE, mark="# ")
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / HOME).mkdir(exist_ok=True)
    for path in (DATA, *CODE):
        shutil.copyfile(path, folder / path)
    (folder / "gate.ini").write_text("[pytest]\nminversion = 6.2\n")
    # No pipe: a child left behind would hold it.
    with tempfile.TemporaryFile() as output:
        end = pytest(folder, output)
        output.seek(0)
        kept = output.read(2**20).rstrip()  # the first MiB
        report = read(folder / "report.xml").decode("ascii", "replace")
        if not report and pytest(folder, output, "--help") != "exit 0":
            raise OSError(f"{sys.executable} has no pytest 6.2.")
    outcome, why = judge(end, report)
    if outcome == log.stem:
        ART.mkdir(exist_ok=True)
        header = f"# {outcome} {NOW} {why}\n{hashes}".encode()
        with log.open("ab") as record:
            record.write(header + kept + b"\n")
    print(re.sub(rb"[^\n -~]", b" ", kept).decode(), why, sep="\n")
    return outcome, why


def red():
    outcome, why = run_tests(RED)
    if outcome == "green":
        return "red.log is green. The gate wants a failure."
    if outcome == "broken":
        return f"That is a broken run, not a failing test. {why}"
    print("red captured")


def model():
    reds = re.findall(rb"# red .*\n((?:# .{64}  .*\n)+)", read(RED))
    if not reds:
        return "No red log. The model waits."
    if not read(PROMPT).decode("utf-8-sig", "replace").strip():
        return "Write artifacts/prompt.txt first."
    if reds[-1] != sums(DATA, *CODE, mark="# ").encode():
        return "The fixture changed since red. Run red again."
    lines = sums(RED, PROMPT, DATA) + sums(*CODE, mark="# ")
    with STAMP.open("xb") as stamp:
        stamp.write(f"# {NOW} model window opened\n{lines}".encode())
    print(sums(STAMP) + "model window open")


def green():
    if not STAMP.exists():
        return "Green before model is a skip, not a pass."
    for path in (RED, PROMPT, DATA):
        if sums(path).encode() not in read(STAMP):
            return f"{path.name} changed after the window opened."
    if run_tests(GREEN, STAMP)[0] != "green":
        return "still red"
    print(sums(GREEN) + "green captured")


def main():
    verbs = {"red": red, "model": model, "green": green}
    verb = verbs.get(" ".join(sys.argv[1:]))
    why = "usage: python gate.py red|model|green"
    try:
        if verb:
            late = verb != green and STAMP.exists()
            sys.exit(OPEN if late else verb())
    except (KeyboardInterrupt, OSError) as err:
        why = f"Stopped. {err}"
    except (OverflowError, ValueError):
        why = f"TIMEOUT={TIMEOUT} is not in seconds."
    print(why, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
