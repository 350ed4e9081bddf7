#!/usr/bin/env python3
"""Take-home A on this machine, start to verdict, in a few seconds.

    python3 tests/demo.py

A shop, a model played by a script, the harness and the grader run as
real processes on free loopback ports, in a temporary folder. Each
command is shown as you would type it, then what it really printed.
Exit status: 0 if the verdict is complete.
"""
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import urllib.request

KIT = pathlib.Path(__file__).resolve().parent.parent


def say(text):
    print(text, flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(script, *args, **settings):
    """Show a command; return it and its environment, to be run."""
    typed = [f"{name}={value}" for name, value in settings.items()]
    typed += ["python3", script, *args]
    say(f"\n$ {' '.join(typed)}")
    return ([sys.executable, "-u", str(KIT / script), *args],
            dict(os.environ, **settings))


@contextlib.contextmanager
def server(script, **settings):
    """Run a server until the block ends; show its first line."""
    args, env = command(script, **settings)
    process = subprocess.Popen(args, env=env, stderr=subprocess.PIPE,
                               encoding="utf-8")
    try:
        say(process.stderr.readline().rstrip())
        yield
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


def run(folder, script, *args, **settings):
    """Run a script to its end; show what it prints, return its status."""
    args, env = command(script, *args, **settings)
    return subprocess.run(args, env=env, cwd=folder, timeout=60,
                          stderr=subprocess.STDOUT).returncode


def show(folder, shop):
    """Show a row, and the trace that the shop has of the same hop."""
    lines = (folder / "replay.jsonl").read_text("utf-8").splitlines()
    row = json.loads(lines[1])
    say(f"\n$ sed -n 2p replay.jsonl\n{lines[1]}")
    url = f"{shop}/_trace/{row['trace_id']}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        say(f"\n$ curl -sS {url}\n{answer.read().decode()}")


def main():
    ports = free_port(), free_port()
    shop, model = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory()))
        say("# The candidate starts a shop, and has a model somewhere.")
        stack.enter_context(server("stub_shop.py", HOST="127.0.0.1",
                                   PORT=str(ports[0])))
        stack.enter_context(server("tests/scripted_model.py",
                                   PORT=str(ports[1])))
        say("\n# The harness lets the model order: one row a hop.")
        if run(folder, "harness.py", STUB_URL=shop, MODEL_NAME="scripted",
               MODEL_BASE_URL=f"{model}/v1"):
            return 1
        say("\n# A row of the file, and what the shop remembers of it.")
        show(folder, shop)
        say("\n# On Monday the grader asks the live shop.")
        return run(folder, "grade.py", "replay.jsonl", shop)


if __name__ == "__main__":
    sys.exit(main())
