#!/usr/bin/env python3
"""Let a model order from a shop, a row a hop.

    STUB_URL=http://127.0.0.1:8080 MODEL_NAME=any \\
    MODEL_BASE_URL=http://127.0.0.1:11434/v1 \\
    python3 harness.py "Order 2 units of sku_light."

REPLAY (replay.jsonl) gets the rows. TIMEOUT (60) is seconds a hop,
MODEL_API_KEY is for the model alone (*** in its errors). Exits with 0
if the shop confirmed what the model said, 1 if not, 2 if unable.
"""
import http.client
import json
import os
import re
import sys
import threading
import time
import urllib.request

STUB = os.getenv("STUB_URL", "").rstrip("/")
MODEL_URL = re.sub("(/chat/completions)?/*$", "/chat/completions",
                   os.getenv("MODEL_BASE_URL", ""), count=1)
MODEL = os.getenv("MODEL_NAME")
API_KEY = os.getenv("MODEL_API_KEY")
REPLAY = os.getenv("REPLAY", "replay.jsonl")
TIMEOUT = os.getenv("TIMEOUT") or "60"
URL = r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?(/[!-\"$->A-~]*)?"
CHECKS = {"STUB_URL": URL, "MODEL_BASE_URL": URL, "MODEL_NAME": ".+",
          "MODEL_API_KEY": "[ -~]*", "TIMEOUT": r"\d{0,5}"}
TURNS = 8
MAX_BODY = 2**18  # bytes
RETRY = (None, 429, 500, 502, 503, 504)
MISFIT = (AttributeError, LookupError, TypeError, ValueError)
TOOLS = [{"type": "function", "function": {
    "name": "create_order",
    "parameters": {"type": "object", "required": ["sku", "qty"],
                   "properties": {"sku": {"type": "string"},
                                  "qty": {"type": "integer"}}}}}]


def parse(body):
    """Return the JSON value of bytes, or their text."""
    try:
        value = json.loads(body.decode())
        # No NaN, no 1e999, not too deep.
        json.dumps([[[[value]]]], allow_nan=False)
        return value
    except (RecursionError, ValueError):
        return body.decode(errors="replace") or None


def fetch(request, answers):
    """Append (status, headers, value), or (None, {}, why)."""
    local = re.match(r"localhost|127\.|\[::1", request.host)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({} if local else None))
    opener.process_response.clear()  # no redirects
    try:
        with opener.open(request, timeout=float(TIMEOUT)) as answer:
            body = answer.read(MAX_BODY)
            if answer.length and len(body) < MAX_BODY:
                raise http.client.IncompleteRead(body)
        if answer.status > 299 and request.has_header("Authorization"):
            body = body.replace(API_KEY.encode(), b"***")
        answers.append((answer.status, answer.headers, parse(body)))
    except (OSError, ValueError, http.client.HTTPException) as err:
        why = getattr(err, "reason", type(err).__name__)  # no headers
        answers.append((None, {}, str(why)))


def hop(url, req, key=None, pauses=(1, 3)):
    """POST req up to three times; return the last row."""
    headers = {"Content-Type": "application/json",
               "User-Agent": "harness/1"}
    if key:
        headers["Idempotency-Key"] = key
    elif API_KEY:
        headers["Authorization"] = f"Bearer {API_KEY}"
    body = json.dumps(req).encode()
    request = urllib.request.Request(url, body, headers)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    answers = [(None, {}, f"no answer in {TIMEOUT} s")]
    thread = threading.Thread(
        target=fetch, args=(request, answers), daemon=True)
    thread.start()
    thread.join(float(TIMEOUT))  # drips reset timeout=
    status, headers, resp = answers[-1]
    row = dict(trace_id=headers.get("X-Trace-Id"), at=at, method="POST",
               url=url, key=key, req=req, status=status, resp=resp)
    if not status:
        row.update(resp=None, error=resp)
    with open(REPLAY, "ab") as replay:
        replay.write(json.dumps(row).encode() + b"\n")
    print("POST", url, status or ascii(resp), file=sys.stderr)
    if status not in RETRY or not pauses:
        return row
    wait = headers.get("Retry-After", "")
    time.sleep(min(float(wait), 30) if wait.isdecimal() else pauses[0])
    return hop(url, req, key, pauses[1:])


def call_model(messages):
    """Return the next message and its calls."""
    row = hop(MODEL_URL, dict(model=MODEL, messages=messages,
                              tools=TOOLS, stream=False))
    try:
        choices = row["status"] == 200 and row["resp"]["choices"]
        message = choices[0]["message"]
        calls = message.get("tool_calls")
        calls = calls if isinstance(calls, list) else []
        for call in calls:
            call["id"] = call.get("id") or "call_" + os.urandom(8).hex()
    except MISFIT:
        sys.exit(f"The model gave no message: see {REPLAY}.")
    return message, calls


def create_order(call, orders):
    """Place a call's order; return its answer."""
    try:
        text = call["function"]["arguments"]
        text = text if isinstance(text, str) else json.dumps(text)
        args = parse(text.encode())
        if (call["function"]["name"] != "create_order"
                or args.keys() != {"sku", "qty"}
                or len(json.loads(text, object_pairs_hook=list)) > 2):
            raise ValueError
    except MISFIT:
        return {"error": "create_order takes just sku and qty"}
    key = "idem_" + os.urandom(16).hex()
    row = hop(STUB + "/orders", args, key)
    status, resp = row["status"], row["resp"]
    if not status:
        sys.exit("The shop gave no answer.")
    order_id = isinstance(resp, dict) and resp.get("order_id")
    if status in (200, 201) and isinstance(order_id, str):
        orders.append(dict(order_id=order_id, status=status, key=key,
                           trace_id=row["trace_id"]))
    return dict(status=status, body=resp)


def converse(prompt, end):
    """Let the model order until it stops."""
    messages = [dict(role="user", content=prompt)]
    for _ in range(TURNS):
        message, calls = call_model(messages)
        messages.append(message)
        for call in calls:
            answer = create_order(call, end["orders"])
            messages.append(dict(role="tool", tool_call_id=call["id"],
                                 content=json.dumps(answer)))
        if not calls:
            break
    else:
        sys.exit("The model goes on calling.")
    end["final"] = message.get("content")
    named = re.findall(r"ord_[\w-]+", json.dumps(end["final"]))
    known = {order["order_id"] for order in end["orders"]}
    if not known or set(named) - known:
        sys.exit("The shop confirmed no such order.")


def main():
    prompt = (sys.argv + ["Order 2 units of sku_light."])[1]
    wrong = [name for name, pattern in CHECKS.items()
             if not re.fullmatch(pattern, os.getenv(name, ""))]
    wrong += sys.argv[2:] + re.findall("^-.*", prompt)
    try:
        wrong or open(REPLAY, "ab").close()
    except OSError:
        wrong = ["REPLAY"]
    if wrong:
        print("Unusable:", wrong[0], file=sys.stderr)
        sys.exit(2)
    end = dict(final=None, orders=[], replay=REPLAY)
    try:
        converse(prompt, end)
    except (KeyboardInterrupt, OSError) as err:
        sys.exit(repr(err))
    finally:
        print(json.dumps(end))


if __name__ == "__main__":
    main()
