#!/usr/bin/env python3
"""A tiny shop: places an order once, remembers every answer.

    HOST=0.0.0.0 PORT=8080 JOURNAL= python3 stub_shop.py

POST /orders, GET /orders/{order_id}, GET /_trace/{X-Trace-Id}. In a
JOURNAL, a file, traces outlive kill -9, not a power cut (no fsync).
Limits: 8 KiB a body, 10 s of silence, 100,000 traces, then 503:
evidence is never thrown away. Exits with 1 if it cannot start.
"""
import http.server
import json
import os
import signal
import socketserver
import sys
import threading
import time

MAX_BODY = 8192  # bytes
MAX_TRACES = 100_000
ORDER = {"sku": str, "qty": int}  # type(True) is bool
LOCK = threading.Lock()  # from look-up to trace
KEYS = {}  # Idempotency-Key -> order_id
ORDERS = {}  # order_id -> JSON, as served
TRACES = {}  # trace_id -> JSON, as served


def remember(line, trace_id, at, method, path, key, req, status, resp):
    """Remember a trace, as JSON and as members."""
    if status == 201:
        order = {"order_id": resp["order_id"], "body": req, "key": key}
        ORDERS[resp["order_id"]] = json.dumps(order).encode()
        KEYS[key] = resp["order_id"]
    TRACES[trace_id] = line


def load(path):
    """Remember a journal's traces; return it, open to append."""
    journal = open(path, "a+b", buffering=0)
    journal.seek(0)
    *lines, torn = journal.read().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            remember(line, **json.loads(line))
        except (KeyError, TypeError, ValueError):
            sys.exit(f"{path}:{number}: not a trace")
    if torn:
        print(f"{path}: torn line cut off", file=sys.stderr)
        journal.truncate(journal.tell() - len(torn))
    return journal


def place(keys, raw, journal):
    """Decide on an order, trace it; return what to _send."""
    if len(TRACES) >= MAX_TRACES:
        return 503, b'{"error": "trace store full"}'
    try:
        req = json.loads(raw.decode())
        json.dumps([[req]], allow_nan=False)  # as deep as in a trace
    except (RecursionError, ValueError):
        req = raw.decode(errors="replace") or None
    key = ", ".join(keys)[:MAX_BODY] if keys else None
    status, resp = 400, {}
    if len(keys) != 1 or not 1 <= len(key) <= 255:
        resp["error"] = "send one Idempotency-Key, 1 to 255 characters"
    elif (type(req) is not dict
          or {name: type(req[name]) for name in req} != ORDER
          or len(json.loads(raw, object_pairs_hook=list)) > 2
          or not req["sku"] or req["qty"] < 1):
        resp["error"] = "send sku, a string, and qty, an integer from 1"
    elif key not in KEYS:
        order_id = "ord_" + os.urandom(16).hex()
        status, resp = 201, {"ok": True, "order_id": order_id}
    elif json.loads(ORDERS[KEYS[key]])["body"] == req:
        status, resp = 200, {"ok": True, "order_id": KEYS[key]}
    else:
        status, resp = 409, {"error": "idempotency conflict"}
    resp["trace_id"] = trace_id = os.urandom(16).hex()
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    trace = {"trace_id": trace_id, "at": at, "method": "POST",
             "path": "/orders", "key": key, "req": req,
             "status": status, "resp": resp}
    line = json.dumps(trace).encode()
    if journal:
        end = journal.seek(0, os.SEEK_END)
        try:
            if journal.write(line + b"\n") <= len(line):
                raise OSError
        except OSError:
            journal.truncate(end)
            return 503, b'{"error": "journal is full"}'
    remember(line, **trace)
    return status, json.dumps(resp).encode(), trace_id


class Shop(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # 0.9 has no status line
    error_content_type = "application/json"
    error_message_format = '{"error": "%(explain)s"}'
    timeout = 8  # seconds of silence
    wbufsize = -1  # one write per answer
    disable_nagle_algorithm = True  # sent at once

    def _read(self, size=""):
        """Return the body, or None once it is refused."""
        size = ",".join(self.headers.get_all("Content-Length") or size)
        if not size.isdecimal() or "Transfer-Encoding" in self.headers:
            return self.send_error(400, None, "no plain Content-Length")
        size = float(size)  # int() refuses 5,000 digits
        if size > MAX_BODY:
            return self.send_error(413, None, "over 8 KiB")
        self.wfile.flush()  # a 100 Continue may wait in it
        raw = self.rfile.read(int(size))
        if len(raw) == size:
            return raw
        return self.send_error(400, None, "body cut off")

    def _send(self, status, body, trace_id=None):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if trace_id:
            self.send_header("X-Trace-Id", trace_id)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        if self.path.partition("?")[0] != "/orders":
            return self.send_error(404, None, "not found")
        raw = self._read()
        if raw is not None:
            keys = self.headers.get_all("Idempotency-Key", [])
            with LOCK:
                answer = place(keys, raw, self.server.journal)
            self._send(*answer)

    def do_GET(self):
        parent, _, name = self.path.partition("?")[0].rpartition("/")
        served = {"": {"": b'{"ok": true}'}, "/orders": ORDERS,
                  "/_trace": TRACES}.get(parent, {})
        if name not in served:
            self.send_error(404, None, "not found")
        elif self._read("0") is not None:
            self._send(200, served[name])

    def log_message(self, *args):
        """Say nothing: the traces are the log."""


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = os.name != "nt"  # there: share the port
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *args):
        if not isinstance(sys.exc_info()[1], OSError):  # it hung up
            super().handle_error(*args)


def main():
    for stop in signal.SIGINT, signal.SIGTERM:
        signal.signal(stop, lambda *_: sys.exit())
    host = os.environ.get("HOST", "0.0.0.0")
    port = os.environ.get("PORT", "8080")
    path = os.environ.get("JOURNAL")
    try:
        server = Server((host, int(port)), Shop)  # the port first
        server.journal = path and load(path)
    except (OSError, OverflowError, ValueError) as err:
        sys.exit(f"stub_shop: {host}:{port}: {err}")
    print("http://%s:%d, traces" % server.server_address,
          f"live in {path}" if path else "die with it",
          file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
