#!/usr/bin/env python3
"""Ask a candidate's live shop about the replay.jsonl handed in.

    python3 grade.py replay.jsonl https://shop.example [--rows N]

Three questions: tool_call, idempotency, wire. Three answers: yes, no,
or ? for what could not be asked. Exit status: 0 complete, 1 incomplete
(a no), 2 usage, 3 not gradable (a ?, not a fail). N (2) rows
are drawn, --seed repeats a draw. It takes a minute at most.
"""
import argparse
import collections
import contextlib
import http.client
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
END = time.monotonic() + 50  # of asking
URL = r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?(/[!-\"$->A-~]*)?"
ID = "[A-Za-z0-9_-]{1,64}"  # what may go into a URL
ROW = {"method", "url", "status", "req", "resp"}
VERDICTS = {0: "complete", 1: "incomplete", 3: "not gradable"}


def need(fact, *why):
    """Raise ValueError, a no, unless something is so."""
    if not fact:
        raise ValueError(" ".join(str(word)[:300] for word in why))


def once(pairs):
    """Return a JSON object; ValueError for a member twice."""
    need(len(dict(pairs)) == len(pairs))
    return dict(pairs)


def canon(value):
    """Return ASCII that tells JSON values apart: 1, 1.0, true."""
    said = json.dumps(value, sort_keys=True, allow_nan=False)
    return said.replace("\x7f", "\\u007f")


def parse(raw):
    """Return the value of some JSON, None if it is none."""
    try:
        said = raw.decode("utf-8-sig")
        value = json.loads(said, object_pairs_hook=once)
        canon([[value]])  # no NaN, no 1e999, not too deep to compare
        return value
    except (RecursionError, ValueError):
        return None


def dig(value, *path):
    """Return what is there in a JSON value, or None."""
    with contextlib.suppress(LookupError, TypeError):
        for step in path:
            value = value[step]
        return value


def text(*path):
    """Return the text that dig finds, or an empty one."""
    found = dig(*path)
    return found if isinstance(found, str) else ""


def read(name):
    """Return a file's rows, and what is wrong with it."""
    rows, wrong = [], []
    with open(name, "rb") as file:
        raw = file.read(MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        return rows, ["over 32 MiB: not a weekend's trace"]
    for number, line in enumerate(re.finditer(b".*\n|.+", raw), 1):
        if not line[0].strip(b"\xef\xbb\xbf \t\r\n"):
            continue
        row = parse(line[0])
        if text(row, "url") and row.keys() >= ROW:
            path = re.sub(r"^\w+://[^/?#]*|[?#].*", "", row["url"])
            shop = row["method"] == "POST" and path.endswith("/orders")
            rows.append(dict(
                row, line=f"row {number}", path=path, shop=shop,
                done=shop and row["status"] in (200, 201),
                order_id=text(row, "resp", "order_id")))
        else:
            wrong.append(canon(f"{name}:{number}") + " is no row")
            if wrong[99:]:
                break  # enough
    return rows, wrong


def tool_call(rows, shop, args):
    """Did the model ask for it, or was the 201 pasted in?"""
    asked, paid, words = collections.defaultdict(list), {}, None
    for row in rows:
        order = canon(row["req"])
        pair = canon(row.get("key")), order
        message = dig(row, "resp", "choices", 0, "message")
        if row["done"] and pair not in paid:
            need(asked[order], row["line"], "posts unasked", order)
            paid[pair] = row["line"], asked[order].pop()
        elif message and row["path"].endswith("/chat/completions"):
            words = dig(message, "content")
            for call in dig(message, "tool_calls", slice(None)) or ():
                order = dig(call, "function", "arguments")
                if isinstance(order, str):
                    order = parse(order.encode(errors="replace"))
                if dig(call, "function", "name") == "create_order":
                    asked[canon(order)].append(row["line"])
    need(paid, "no shop row has 200 or 201")
    named = set(re.findall("ord_[A-Za-z0-9_-]+", canon(words)))
    named -= {row["order_id"] for row in shop if row["done"]}
    need(not named, "no shop row returned", canon(sorted(named)))
    return "%s posts what %s asked for" % next(iter(paid.values()))


def ask(url, *post, lost=404):
    """Return status, JSON and trace_id; OSError if they say nothing."""
    answers = []

    def fetch():
        with contextlib.suppress(
                OSError, ValueError, http.client.HTTPException):
            request = urllib.request.Request(url, *post)
            request.add_header("User-Agent", "grade/1")
            with urllib.request.urlopen(request, timeout=60) as got:
                body = got.read(MAX_BODY)
            if not got.length or len(body) == MAX_BODY:  # not cut off
                answers.append((got.status, parse(body),
                                got.headers["X-Trace-Id"]))

    thread = threading.Thread(target=fetch, daemon=True)
    if threading.active_count() == 1:  # none was late
        thread.start()
        thread.join(min(WAIT, END - time.monotonic()))
    status = answers[0][0] if answers else 0
    if status in (0, 429, lost) or status // 100 in (3, 5):
        raise OSError(f"{status or 'no answer'} from {url}")
    return answers[0]


def compare(base, row, lost=404):
    """Return a row and the shop's trace of it, as texts."""
    url = f"{base}/_trace/{row['trace_id']}"
    status, trace, _ = ask(url, lost=lost)
    need(status == 200 and isinstance(trace, dict),
         "no trace but", status, canon(trace))
    trace = {"method": "POST", "req": trace.get("body"), **trace}
    names = ["method", "path", "key", "req", "status", "resp"]
    if "resp" not in trace:  # as in the public article
        names[5:] = ["order_id"] if row["order_id"] else []
    path = str(trace.get("path"))
    if path.endswith("/orders") and row["path"].endswith(path):
        row = dict(row, path=path)  # the URL may have a prefix
    return [{name: canon(side.get(name)) for name in names}
            for side in (row, trace)]


def idempotency(rows, shop, args):
    """Does the live shop enforce it?"""
    orders = {}  # key -> order_id
    for row in shop:
        key, order_id = text(row, "key"), row["order_id"]
        need(key, row["line"], "has no key")
        need(not row["done"]
             or orders.setdefault(key, order_id) == order_id,
             row["line"], "has a second order for", canon(key))
    key, qty = os.urandom(8).hex(), random.randint(2, 9999)
    for due, qty in (201, qty), (200, qty), (409, qty + 1):
        req = {"sku": "sku_grade", "qty": qty}
        row = {"method": "POST", "path": args.url + "/orders",
               "key": key, "req": req, "status": due}
        status, row["resp"], row["trace_id"] = ask(
            row["path"], canon(req).encode(), {
                "Content-Type": "application/json",
                "Idempotency-Key": key})
        order_id = row["order_id"] = text(row, "resp", "order_id")
        need(status == due and re.fullmatch(ID, str(row["trace_id"]))
             and (due == 409 or re.fullmatch(ID, order_id)
                  and orders.setdefault(key, order_id) == order_id),
             due, "is due, not", status, canon(row["resp"]))
        sent, kept = compare(args.url, row, lost=0)
        need(sent == kept, due, "is traced as", kept)
    status = ask(f"{args.url}/orders/{orders[key]}", lost=0)[0]
    need(status == 200, status, "for order", orders[key])
    return "201, then 200, then 409, each traced"


def wire(rows, shop, args):
    """Do the rows match what the shop itself remembers?"""
    need(not args.wrong, *args.wrong[:1])
    traced, errors = {}, []
    for row in shop:
        trace_id = text(row, "trace_id")
        if trace_id or row["status"] in (200, 201, 400, 409):
            need(re.fullmatch(ID, trace_id) and trace_id not in traced
                 and (row["order_id"] or not row["done"]),
                 row["line"], "lacks an order_id or its own trace_id")
            traced[trace_id] = row
    need(traced, "no shop row with a trace_id")
    drawn = list(traced.values())
    random.Random(args.seed).shuffle(drawn)
    first = {str(row["status"]): row for row in drawn}
    drawn.sort(key=lambda row: row is not first[str(row["status"])])
    del drawn[args.rows:]
    for row in drawn:
        url = f"{args.url}/_trace/{row['trace_id']}"
        print(f"{row['line']}  curl -sS {shlex.quote(url)}")
        try:
            file, shop = compare(args.url, row)
            for label, side in ("file", file), ("shop", shop):
                pairs = [f'"{k}": {v[:300]}' for k, v in side.items()]
                print(f"  {label}  {{{', '.join(pairs)}}}")
            differ = [name for name in file if file[name] != shop[name]]
            print("  differ:" if differ else "  match", *differ)
            need(not differ, row["line"], "differs in", *differ)
        except (OSError, ValueError) as err:
            errors.append(err)
    if errors:
        raise min(errors, key=lambda err: isinstance(err, OSError))
    return f"{len(drawn)} of {len(traced)} rows, seed {args.seed}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("replay")
    parser.add_argument("url", type=lambda url: url.rstrip("/"))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seed", type=int, default=os.getpid())
    args = parser.parse_args()
    if args.rows < 1 or not re.fullmatch(URL, args.url, re.ASCII):
        parser.error("--rows is 1 or more, the URL http(s)://host/path")
    if re.match(r"\w+://(localhost|127\.|\[::1)", args.url):
        os.environ["no_proxy"] = "*"
    opener = urllib.request.build_opener()
    opener.process_response.clear()  # no redirect, no HTTPError
    urllib.request.install_opener(opener)
    try:
        rows, args.wrong = read(args.replay)
    except OSError as err:
        parser.error(f"{canon(args.replay)[:300]}: {err.strerror}")
    shop, words = [row for row in rows if row["shop"]], []
    for check in tool_call, idempotency, wire:
        try:
            word, why = "yes", check(rows, shop, args)
        except (OSError, ValueError) as err:
            word, why = "?" if isinstance(err, OSError) else "no", err
        print(f"{check.__name__.replace('_', ' '):12} {word:4} {why}")
        words.append(word)
    print("note: an order of sku_grade may stay behind on the shop")
    if any(row["url"] != args.url + "/orders" for row in shop):
        print(f"note: not every row was recorded against {args.url}")
    code = 1 if "no" in words else 3 if "?" in words else 0
    print("verdict:", VERDICTS[code])
    sys.exit(code)


if __name__ == "__main__":
    main()
