#!/usr/bin/env python3
"""Ask a candidate's live shop about the replay.jsonl handed in.

    python3 grade.py replay.jsonl URL [--rows 2] [--seed N]

Answers three questions, tool_call, idempotency and wire, with yes, no,
or ? for what could not be asked. Exit status: 0 complete, 1 incomplete
(a no), 2 usage, 3 not gradable (a ?, no fail). No proxy is used.
"""
import argparse
import collections
import contextlib
import http.client
import io
import json
import os
import random
import re
import shlex
import sys
import threading
import types

MAX_FILE = 32 << 20  # bytes
MAX_BODY = 1 << 20  # bytes of an answer
WAIT = 20  # seconds for an answer
URL = r"https?://(?![/:])[!-\"$->A-~]{1,300}"
ROW = {"method", "url", "status", "req", "resp"}


def need(fact, *why):
    """Raise a no unless something is so."""
    if not fact:
        raise ValueError("no", " ".join(map(str, why))[:900])


def text(value):
    """Return ASCII that tells 1, 1.0 and true apart."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parse(said):
    """Return the value of JSON, or None."""
    with contextlib.suppress(RecursionError, TypeError, ValueError):
        value = json.loads(said, object_pairs_hook=lambda pairs: (
            need(len(dict(pairs)) == len(pairs)) or dict(pairs)))
        text([[value]])  # no NaN, no 1e999, not too deep to compare
        return value


def dig(value, *path):
    """Return a part of a value, or None."""
    with contextlib.suppress(LookupError, TypeError):
        for step in path:
            value = value[step]
        return value


def ident(value):
    """Return an id fit for a URL, or None."""
    if re.fullmatch(r'"[\w-]{1,64}"', text(value)):
        return value


def read(name):
    """Return a file's rows and what is wrong."""
    with open(name, "rb") as file:
        raw = file.read(MAX_FILE + 1)
    rows = []
    wrong = raw[MAX_FILE:] and "over 32 MiB: not a weekend's trace"
    for count, line in enumerate(io.BytesIO(raw), 1):
        said = line.strip(b"\xef\xbb\xbf \t\r\n") and parse(line)
        if isinstance(said, dict) and said.keys() >= ROW:
            row = types.SimpleNamespace(**{"key": None, **said})
            row.line = f"row {count}"
            row.path = str(row.url).split("?")[0]
            row.trace_id = ident(said.get("trace_id"))
            row.order_id = ident(dig(row.resp, "order_id"))
            row.shop = f"{row.method} {row.path[-7:]}" == "POST /orders"
            row.done = row.shop and row.status in (200, 201)
            rows.append(row)
        elif said != b"":
            return rows, wrong or text(f"{name}:{count}") + " is no row"
    return rows, wrong


def tool_call(rows, args):
    """Did the model ask for it, or was the 201 pasted in?"""
    asked, paid, words = collections.Counter(), {}, None
    for row in rows:
        order = text(row.req)
        if row.done and (text(row.key), order) not in paid:
            need(asked[order], row.line, "posts unasked", order)
            asked[order] -= 1
            paid[text(row.key), order] = row.line
        elif row.path.endswith("/chat/completions"):
            message = dig(row.resp, "choices", 0, "message")
            words = dig(message, "content")
            for call in dig(message, "tool_calls", slice(None)) or ():
                order = dig(call, "function", "arguments")
                if dig(call, "function", "name") == "create_order":
                    asked[text(parse(order) or order)] += 1
    need(paid, "no order was placed")
    named = set(re.findall(r"ord_[\w-]+", text(words)))
    named -= {row.order_id for row in rows if row.done}
    need(not named, "never returned:", text(sorted(named)))
    return "asked for before " + ", ".join(paid.values())[:300]


def ask(url, *post, lost=404):
    """Return an answer as a row; raise a ? for none."""
    kind, _, host, path = url.split("/", 3)
    kind = kind[:-1].upper() + "Connection"
    row = types.SimpleNamespace(method="POST", path=url, status=0)

    def fetch():
        with contextlib.suppress(OSError, OverflowError, ValueError,
                                 http.client.HTTPException):
            link = getattr(http.client, kind)(host, timeout=60)
            link.request("POST" if post else "GET", "/" + path, *post)
            got = link.getresponse()
            row.resp = parse(got.read(MAX_BODY))
            row.trace_id = ident(got.headers["X-Trace-Id"])
            row.order_id = ident(dig(row.resp, "order_id"))
            if not got.length:  # not cut off
                row.status = got.status

    thread = threading.Thread(target=fetch, daemon=True)
    if threading.active_count() == 1:  # none was late
        thread.start()
        thread.join(WAIT)
    if row.status in (0, 429, lost) or row.status // 100 in (3, 5):
        raise ValueError("?", f"{row.status or 'no answer'} from {url}")
    return row


def compare(base, row, show=print, lost=404):
    """Show a row and its trace; raise a no if they differ."""
    url = f"{base}/_trace/{row.trace_id}"
    show(f"{row.line}  curl -sS {shlex.quote(url)}")
    trace = ask(url, lost=lost).resp
    need(isinstance(trace, dict), row.line, "no trace but", text(trace))
    trace = {"method": "POST", "req": trace.get("body"), **trace}
    names = "method path key req status resp".split()
    if "resp" not in trace:  # as in the article
        names[5:] = ["order_id"] if row.order_id else []
    tail = len(str(trace.get("path")))  # the URL may have a prefix
    row = dict(vars(row), path=row.path[-tail:])
    for label, side in ("file", row), ("shop", trace):
        side = {name: side.get(name) for name in names}
        show(f"  {label}  {text(side)[:900]}")
    differ = [name for name in names
              if text(row[name]) != text(trace.get(name))]
    show(f"  {' '.join(differ) or 'match'}")
    need(not differ, row["line"], "differs in", *differ, text(trace))


def idempotency(rows, args):
    """Does the live shop enforce it?"""
    orders, ids = {}, []
    for row in rows:
        need(row.key or not row.shop, row.line, "has no key")
        need(not row.done or row.order_id == orders.setdefault(
            text(row.key), row.order_id), row.line, "is a second order")
    url, key = args.url + "/orders", os.urandom(8).hex()
    qty = random.randint(2, 9999)
    for due, qty in (201, qty), (200, qty), (409, qty + 1):
        req = {"sku": "sku_grade", "qty": qty}
        row = ask(url, text(req).encode(), {
            "Content-Type": "application/json", "Idempotency-Key": key})
        need(row.status == due and row.trace_id,
             due, "traced is due, not", row.status, text(row.resp))
        row.key, row.req, row.line = key, req, due
        compare(args.url, row, str, lost=0)  # not shown
        ids.append(row.order_id)
    need(ids[0] and ids[0] == ids[1], "not one id:", ids)
    need(ask(f"{url}/{ids[0]}", lost=0).status == 200, "lost", ids[0])
    return "201, 200, 409, all traced; an order stays behind"


def wire(rows, args):
    """Do the rows match what the shop itself remembers?"""
    need(not args.wrong, args.wrong)
    traced, errors = {}, []
    for row in rows:
        if row.shop and (
                row.trace_id or row.status in (200, 201, 400, 409)):
            need(row.trace_id and row.trace_id not in traced
                 and (row.order_id or not row.done),
                 row.line, "lacks an id or has one twice")
            traced[row.trace_id] = row
    need(traced, "no shop row is traced")
    drawn = list(traced.values())
    random.Random(args.seed).shuffle(drawn)
    first = {str(row.status): row for row in drawn}
    drawn.sort(key=lambda row: row is not first[str(row.status)])
    del drawn[args.rows:]
    print("seed", args.seed)
    for row in drawn:
        try:
            compare(args.url, row)
        except ValueError as err:
            errors.append(err.args)
    if errors:
        raise ValueError(*max(errors))  # a no before a ?
    return f"{len(drawn)} of {len(traced)} rows"


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("replay")
    add("url", type=lambda url: url.rstrip("/"))
    add("--rows", type=int, default=2)
    add("--seed", type=int, default=os.getpid())
    args = parser.parse_args()
    if args.rows < 1 or not re.fullmatch(URL, args.url):
        parser.error("--rows from 1, URL http(s)://host/path")
    try:
        rows, args.wrong = read(args.replay)
    except OSError as err:
        parser.error(err)
    words = ""
    for check in tool_call, idempotency, wire:
        try:
            word, why = "yes", check(rows, args)
        except ValueError as err:
            word, why = err.args
        print(f"{check.__name__.replace('_', ' '):12} {word:4} {why}")
        words += word
    if {row.path for row in rows if row.shop} - {args.url + "/orders"}:
        print("note: recorded against another host")
    code = 1 if "no" in words else 3 if "?" in words else 0
    ends = {0: "complete", 1: "incomplete", 3: "not gradable"}
    print("verdict:", ends[code])
    sys.exit(code)


if __name__ == "__main__":
    main()
