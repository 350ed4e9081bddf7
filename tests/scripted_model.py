#!/usr/bin/env python3
"""A chat endpoint that plays a model: it calls the tool, then reports.

    PORT=11434 python3 tests/scripted_model.py

It reads "Order N units of SKU" from the user's message, answers with one
call of create_order, and after the tool has answered says what it said.
For candidates without a model, and for the demo. HOST is 127.0.0.1.
"""
import http.server
import json
import os
import re
import signal
import sys


def reply(messages):
    """Return the next message of the assistant."""
    last = messages[-1]
    if last["role"] == "tool":
        answer = json.loads(last["content"])
        body = answer.get("body")
        if isinstance(body, dict) and "order_id" in body:
            words = f"Done: the shop placed {body['order_id']}."
        else:
            words = f"The shop placed no order: {last['content']}"
        return {"role": "assistant", "content": words}
    asked = re.search(r"Order (\d{1,9}) units? of ([\w-]+)",
                      str(last["content"]), re.IGNORECASE)
    if not asked:
        return {"role": "assistant",
                "content": 'Say "Order 2 units of sku_light."'}
    order = json.dumps({"sku": asked[2], "qty": int(asked[1])})
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "create_order", "arguments": order}}]}


class Model(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        try:
            message = reply(json.loads(self.rfile.read(size))["messages"])
            status = 200
            answer = {"object": "chat.completion", "choices": [{
                "index": 0, "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message
                else "stop"}]}
        except (AttributeError, LookupError, TypeError, ValueError):
            status, answer = 400, {"error": {"message": "not a chat"}}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Say nothing: the harness writes down every hop."""


def main():
    for stop in signal.SIGINT, signal.SIGTERM:
        signal.signal(stop, lambda *_: sys.exit())
    address = os.getenv("HOST", "127.0.0.1"), int(os.getenv("PORT", "11434"))
    server = http.server.ThreadingHTTPServer(address, Model)
    print("http://%s:%d/v1 plays a model" % server.server_address[:2],
          file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
