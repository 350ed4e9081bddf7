#!/usr/bin/env python3
"""Ask a candidate's live shop about the replay.jsonl handed in.

    python3 grade.py replay.jsonl https://shop.example [--rows N]

tool call: did the model ask for it, or was the 201 pasted in?
idempotency: does the live shop enforce it?
wire: do N (2) rows match what the shop itself remembers?

Each gets yes, no or ? (could not be asked). Exit status: 0 complete, 1
incomplete (a no), 2 usage, 3 not gradable (a ?, which is not a fail).
--seed repeats a draw. It takes a minute at most.
"""
import argparse
import http.client
import itertools
import json
import os
import random
import re
import shlex
import sys
import threading
import time
import urllib.request

MAX_FILE = 32 << 20  # bytes
MAX_BODY = 1 << 20  # bytes of an answer
WAIT = 20  # seconds for an answer
END = [time.monotonic() + 50]  # when to stop asking
URL = r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?(/[!-\"$->A-~]*)?"
ID = "[A-Za-z0-9_-]{1,64}"  # what may go into a URL
ROW = {"method", "url", "status", "req", "resp"}
VERDICTS = {0: "complete", 1: "incomplete", 3: "not gradable"}


def need(fact, *why):
    """Raise ValueError, a no, unless something is so."""
    if not fact:
        raise ValueError(" ".join(map(str, why)))


def once(pairs):
    """Return a JSON object; ValueError for a member twice."""
    need(len(dict(pairs)) == len(pairs))
    return dict(pairs)


def canon(value):
    """Return a text that tells JSON values apart: 1, 1.0, true."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parse(text):
    """Return the value of a JSON text, None if it is none."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=once)
        canon([[value]])  # no NaN, no 1e999, not too deep to compare
        return value
    except (RecursionError, ValueError):
        return None


def dig(value, *path):
    """Return what is there in a JSON value, or None."""
    try:
        for step in path:
            value = value[step]
        return value
    except (LookupError, TypeError):
        return None


def order_of(resp):
    """Return the order_id of an answer, or an empty string."""
    found = dig(resp, "order_id")
    return found if isinstance(found, str) else ""


def show(value):
    """Return a value as printable ASCII, at most 300 characters."""
    return canon(value).replace("\x7f", "\\u007f")[:300]


def read(name):
    """Return a file's rows, and what is wrong with it."""
    rows, wrong = [], None
    with open(name, "rb") as file:
        raw = file.read(MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        return [], "over 32 MiB: not a weekend's trace"
    for number, line in enumerate(raw.split(b"\n"), 1):
        row = parse(line)
        if (isinstance(row, dict) and row.keys() >= ROW
                and isinstance(row["url"], str)):
            path = re.sub(r"^\w+://[^/?#]*|[?#].*", "", row["url"])
            shop = row["method"] == "POST" and path.endswith("/orders")
            row.update(line=f"row {number}", path=path, shop=shop,
                       done=shop and row["status"] in (200, 201),
                       order_id=order_of(row["resp"]))
            rows.append(row)
        elif line.strip(b"\xef\xbb\xbf \t\r"):
            wrong = wrong or f"{show(f'{name}:{number}')} is no row"
    return rows, wrong


def tool_call(rows):
    """Did the model ask for it, or was the 201 pasted in?"""
    asked, paid, words = {}, {}, None
    for row in rows:
        order = canon(row["req"])
        pair = str(row.get("key")), order
        message = dig(row, "resp", "choices", 0, "message")
        if row["done"] and row.get("key") and pair not in paid:
            need(asked.get(order), row["line"], "posts", order[:300],
                 "which no earlier model row asked for")
            paid[pair] = row["line"], asked[order].pop(0)
        elif message and row["path"].endswith("/chat/completions"):
            words = dig(message, "content")
            calls = dig(message, "tool_calls")
            for call in calls if isinstance(calls, list) else ():
                args = dig(call, "function", "arguments")
                args = parse(args) if isinstance(args, str) else args
                if dig(call, "function", "name") == "create_order":
                    lines = asked.setdefault(canon(args), [])
                    lines.append(row["line"])
    need(paid, "no shop row has 200 or 201")
    named = set(re.findall("ord_[A-Za-z0-9_-]+", canon(words)))
    named -= {row["order_id"] for row in rows if row["done"]}
    need(not named, "no shop row returned", show(sorted(named)))
    return "%s posts what %s asked for" % next(iter(paid.values()))


def fetch(request, answers):
    """Append status, JSON and headers of an answer, if one comes."""
    local = re.match(r"\w+://(localhost|127\.|\[::1)", request.full_url)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({} if local else None))
    opener.process_response.clear()  # no redirect, no HTTPError
    try:
        with opener.open(request, timeout=WAIT) as answer:
            body = answer.read(MAX_BODY)
        if not answer.length or len(body) == MAX_BODY:  # not cut off
            answers.append((answer.status, parse(body), answer.headers))
    except (OSError, ValueError, http.client.HTTPException):
        pass


def ask(url, req=None, key="", lost=404):
    """Return status, JSON and headers; OSError if they say nothing."""
    request = urllib.request.Request(url, headers={
        "Content-Type": "application/json", "User-Agent": "grade/1"})
    if req:
        request.data = json.dumps(req).encode()
        request.add_header("Idempotency-Key", key)
    answers = []
    thread = threading.Thread(
        target=fetch, args=(request, answers), daemon=True)
    left = min(WAIT, END[0] - time.monotonic())
    if left > 0:
        thread.start()
        thread.join(left)
    if not answers:
        END[0] *= not thread.is_alive()  # after a late one, no more
        raise OSError("no answer from " + url)
    status = answers[0][0]
    if status in (429, lost) or status // 100 in (3, 5):
        raise OSError(f"{status} from {url}")
    return answers[0]


def compare(base, row, lost=404):
    """Return what a row and the shop's trace of it say: two dicts."""
    url = f"{base}/_trace/{row['trace_id']}"
    status, trace, _ = ask(url, lost=lost)
    need(status == 200 and isinstance(trace, dict),
         "not a trace but", status, show(trace))
    shop = {"method": "POST", "req": trace.get("body"), **trace}
    names = ["method", "path", "key", "req", "status", "resp"]
    if "resp" not in trace:  # as in the public article
        names[5:] = ["order_id"] if row["order_id"] else []
    path = str(trace.get("path"))
    if path.endswith("/orders") and row["path"].endswith(path):
        shop["path"] = row["path"]  # the URL may have a prefix
    return [{name: side.get(name) for name in names}
            for side in (row, shop)]


def idempotency(rows, base):
    """Does the live shop enforce it?"""
    orders = {}  # key -> order_id
    for row in rows:
        key, order_id = row.get("key"), row["order_id"]
        need(key and isinstance(key, str), row["line"], "has no key")
        need(not row["done"]
             or orders.setdefault(key, order_id) == order_id,
             row["line"], "has a second order for", show(key))
    key, qty, first = os.urandom(8).hex(), random.randint(2, 9999), ""
    for due, qty in (201, qty), (200, qty), (409, qty + 1):
        req = {"sku": "sku_grade", "qty": qty}
        status, resp, headers = ask(base + "/orders", req, key)
        row = dict(method="POST", path=base + "/orders", key=key,
                   req=req, status=due, resp=resp,
                   trace_id=headers["X-Trace-Id"] or "",
                   order_id=order_of(resp))
        first = first or row["order_id"]
        need(status == due and re.fullmatch(ID, row["trace_id"])
             and re.fullmatch(ID, first)
             and (due == 409 or row["order_id"] == first),
             due, "and a trace are due, not", status, show(resp))
        sent, kept = map(canon, compare(base, row, lost=0))
        need(sent == kept, due, "is traced as", kept[:300])
    status = ask(f"{base}/orders/{first}", lost=0)[0]
    need(status == 200, status, "for order", first)
    return f"201, then 200, then 409, each traced; {first} stays"


def wire(rows, wrong, base, count, seed):
    """Do the rows match what the shop itself remembers?"""
    need(not wrong, wrong)
    traced, tiers, errors = {}, {}, []
    for row in rows:
        trace_id = row.get("trace_id")
        if trace_id or row["status"] in (200, 201, 400, 409):
            need(isinstance(trace_id, str)
                 and re.fullmatch(ID, trace_id)
                 and trace_id not in traced
                 and (row["order_id"] or not row["done"]),
                 row["line"], "lacks an order_id or its own trace_id")
            traced[trace_id] = row
    need(traced, "no shop row with a trace_id")
    shuffled = random.Random(seed).sample(list(traced), len(traced))
    for row in map(traced.get, shuffled):
        tiers.setdefault(canon(row["status"]), []).append(row)
    drawn = [row for tier in itertools.zip_longest(*tiers.values())
             for row in tier if row][:count]
    for row in drawn:
        url = shlex.quote(f"{base}/_trace/{row['trace_id']}")
        print(f"{row['line']}  curl -sS {url}")
        try:
            file, shop = compare(base, row)
            for label, side in ("file", file), ("shop", shop):
                pairs = [f'"{name}": {show(value)}'
                         for name, value in side.items()]
                print(f"  {label}  {{{', '.join(pairs)}}}")
            differ = [name for name in file
                      if canon(file[name]) != canon(shop[name])]
            print("  differ:" if differ else "  match", *differ)
            need(not differ, row["line"], "differs in", *differ)
        except (OSError, ValueError) as err:
            errors.append(err)
    for err in sorted(errors, key=lambda err: isinstance(err, OSError)):
        raise err
    return f"{len(drawn)} of {len(rows)} rows, seed {seed}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("replay")
    parser.add_argument("url")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seed", type=int,
                        default=random.randrange(999))
    args = parser.parse_args()
    base, words = args.url.rstrip("/"), []
    if args.rows < 1 or not re.fullmatch(URL, base):
        parser.error("--rows is 1 or more, the URL http(s)://host/path")
    try:
        rows, wrong = read(args.replay)
    except OSError as err:
        parser.error(f"the file cannot be opened: {err.strerror}")
    shop = [row for row in rows if row["shop"]]
    for name, check, *given in (
            ("tool call", tool_call, rows),
            ("idempotency", idempotency, shop, base),
            ("wire", wire, shop, wrong, base, args.rows, args.seed)):
        try:
            word, why = "yes", check(*given)
        except ValueError as err:
            word, why = "no", err
        except OSError as err:
            word, why = "?", err
        print(f"{name:12} {word:4} {why}")
        words.append(word)
    host = base.split("/")[2]
    if any(row["url"].split("/")[2:3] != [host] for row in shop):
        print(f"note: not every row was recorded against {host}")
    code = 1 if "no" in words else 3 if "?" in words else 0
    print("verdict:", VERDICTS[code])
    sys.exit(code)


if __name__ == "__main__":
    main()
