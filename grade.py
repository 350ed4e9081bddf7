#!/usr/bin/env python3
"""Ask a candidate's live shop about the replay.jsonl handed in.

    python3 grade.py replay.jsonl https://shop.example [--rows N]

tool call: did the model ask for it, or was the 201 pasted in?
idempotency: does the live shop enforce it?
wire: do N (2) rows match what the shop itself remembers?

Each gets yes, no or ? (could not be asked); nothing is added up. Exit
status: 0 complete, 1 incomplete (a no), 2 usage, 3 not gradable (a ?:
not a fail). --seed repeats a draw. It all takes a minute at most.
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
URL = r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d+)?(/[!-\"$->A-~]*)?"
MISFIT = (AttributeError, LookupError, RecursionError, TypeError,
          ValueError)  # what JSON of another shape raises


def need(fact, *why):
    """Raise ValueError, which is a no, unless something is so."""
    if not fact:
        raise ValueError(" ".join(map(str, why)))


def once(pairs):
    """Return the pairs as a dict; ValueError for a member twice."""
    need(len(dict(pairs)) == len(pairs), "a member twice")
    return dict(pairs)


def canon(value):
    """Return a text that tells JSON values apart: 1, 1.0, true."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parse(text):
    """Return the JSON value of a text, or raise a MISFIT."""
    value = json.loads(text, object_pairs_hook=once)
    canon([[value]])  # no NaN, no 1e999, not too deep to compare
    return value


def show(value):
    """Return a value as printable ASCII, at most 300 characters."""
    return canon(value).replace("\x7f", "\\u007f")[:300]


def is_id(value):
    """May it go into a URL?"""
    return (isinstance(value, str)
            and re.fullmatch("[A-Za-z0-9_-]{1,64}", value))


def order_of(row):
    """Return the order_id that a row was answered, or None."""
    found = isinstance(row["resp"], dict) and row["resp"].get("order_id")
    return found if isinstance(found, str) else None


def read(name):
    """Return the rows of a file, and what is wrong with it."""
    rows, wrong = [], None
    with open(name, "rb") as file:
        raw = file.read(MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        return [], "over 32 MiB: not a weekend's trace"
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            if line.strip():
                row = parse(line.decode("utf-8-sig"))
                path = re.sub(r"^\w+://[^/?#]*|[?#].*", "", row["url"])
                shop = row["method"] == "POST" and path.endswith("/orders")
                row.update(line=f"row {number}", path=path, shop=shop)
                row["status"], row["req"], row["resp"]
                rows.append(row)
        except MISFIT:
            wrong = wrong or f"{show(f'{name}:{number}')} is no row"
    return rows, wrong


def wanted(call):
    """Return the order that a tool call asks for, or None."""
    try:
        args = call["function"]["arguments"]
        args = parse(args) if isinstance(args, str) else args
        return call["function"]["name"] == "create_order" and canon(args)
    except MISFIT:
        return None


def tool_call(rows):
    """Did the model ask for it, or was the 201 pasted in?"""
    asked, paid, words, known = {}, {}, None, set()
    for row in rows:
        order = canon(row["req"])
        pair = canon(row.get("key")), order
        if row["path"].endswith("/chat/completions"):
            try:
                message = row["resp"]["choices"][0]["message"]
                words = message.get("content")
                for call in message.get("tool_calls") or ():
                    asked.setdefault(wanted(call), []).append(row["line"])
            except MISFIT:
                pass  # no words of a model
        elif row["shop"] and row["status"] in (200, 201):
            known.add(order_of(row))
            if pair not in paid:
                need(asked.get(order), row["line"], "posts", order,
                     "which no earlier model row asked for")
                paid[pair] = row["line"], asked[order].pop(0)
    need(paid, "no shop row has 200 or 201")
    named = set(re.findall("ord_[A-Za-z0-9_-]+", canon(words))) - known
    need(not named, "no shop row returned", show(sorted(named)))
    return "%s posts what %s asked for" % next(iter(paid.values()))


def fetch(request, answers):
    """Append status, JSON and headers of the answer, if one comes."""
    local = re.match(r"\w+://(localhost|127\.|\[::1)", request.full_url)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({} if local else None))
    opener.process_response.clear()  # no redirect, no HTTPError
    try:
        with opener.open(request, timeout=WAIT) as answer:
            body = answer.read(MAX_BODY)
        if answer.length and len(body) < MAX_BODY:
            return  # cut off
    except (OSError, ValueError, http.client.HTTPException):
        return
    try:
        value = parse(body.decode())
    except MISFIT:
        value = None
    answers.append((answer.status, value, answer.headers))


def ask(url, req=None, key="", gone=404):
    """Return status, JSON and headers; OSError if they say nothing."""
    request = urllib.request.Request(
        url, req and json.dumps(req).encode(), {
            "Content-Type": "application/json", "User-Agent": "grade/1",
            **({"Idempotency-Key": key} if key else {})})
    answers = []
    thread = threading.Thread(
        target=fetch, args=(request, answers), daemon=True)
    thread.start()
    thread.join(max(0, min(WAIT, END[0] - time.monotonic())))
    if not answers:
        END[0] *= not thread.is_alive()  # late: ask nothing more
        raise OSError(f"no answer from {url}")
    status = answers[0][0]
    if status in (429, gone) or status // 100 in (3, 5):
        raise OSError(f"{status} from {url}")
    return answers[0]


def compare(base, row, gone=404):
    """Return what a row and the shop's trace of it say in common."""
    status, trace, _ = ask(f"{base}/_trace/{row['trace_id']}", gone=gone)
    need(status == 200 and isinstance(trace, dict)
         and {"key", "status"} <= trace.keys()
         and {"req", "body"} & trace.keys(),
         row["line"], "has no trace but", status, show(trace))
    shop = {"method": "POST", "req": trace.get("body"), **trace}
    file = {name: row.get(name) for name in
            ("method", "path", "key", "req", "status", "resp")}
    if "resp" not in shop:  # as in the public article
        del file["resp"]
        file["order_id"] = order_of(row) or shop.get("order_id")
    path = str(shop.get("path"))
    if path.endswith("/orders") and row["path"].endswith(path):
        file["path"] = path
    return file, {name: shop.get(name) for name in file}


def idempotency(shop, base):
    """Does the live shop enforce it?"""
    orders = {}  # key -> order_id
    for row in shop:
        key, order = row.get("key"), order_of(row)
        need(key and isinstance(key, str), row["line"], "has no key")
        need(row["status"] not in (200, 201)
             or orders.setdefault(key, order) == order,
             row["line"], "has a second order for", show(key))
    key, qty, order = os.urandom(16).hex(), random.randint(2, 10**6), None
    for due, qty in (201, qty), (200, qty), (409, qty + 1):
        req = {"sku": "sku_grade", "qty": qty}
        status, resp, headers = ask(base + "/orders", req, key)
        row = {"line": f"probe {due}", "path": base + "/orders",
               "key": key, "req": req, "status": status, "resp": resp,
               "method": "POST", "trace_id": headers.get("X-Trace-Id")}
        order = order or order_of(row)
        need(status == due and is_id(row["trace_id"]) and
             (due == 409 or is_id(order) and order == order_of(row)),
             f"{due} is due, {status} {show(resp)} comes")
        sent, kept = compare(base, row, gone=None)
        need(canon(sent) == canon(kept), row["line"], "is traced as",
             show(kept))
    status = ask(f"{base}/orders/{order}", gone=None)[0]
    need(status == 200, status, "comes from GET /orders/" + order)
    return f"201, then 200, then 409, each traced; {order} stays behind"


def wire(shop, wrong, base, count, seed):
    """Do the rows match what the shop itself remembers?"""
    need(not wrong, wrong)
    traced = {}  # trace_id -> row
    for row in shop:
        trace_id, status = row.get("trace_id"), row["status"]
        if trace_id is not None or status in (200, 201, 400, 409):
            need(is_id(trace_id) and trace_id not in traced
                 and (order_of(row) or status not in (200, 201)),
                 row["line"], "lacks a trace_id of its own or an order_id")
            traced[trace_id] = row
    need(traced, "no shop row with a trace_id")
    rows = list(traced.values())
    random.Random(seed).shuffle(rows)
    tiers = {}  # status -> rows
    for row in rows:
        tiers.setdefault(canon(row["status"]), []).append(row)
    rounds = itertools.zip_longest(*tiers.values())
    drawn = [row for one in rounds for row in one if row][:count]
    errors = []
    for row in drawn:
        url = f"{base}/_trace/{row['trace_id']}"
        print(f"{row['line']}  curl -sS {shlex.quote(url)}")
        try:
            sides = compare(base, row)
            for label, side in zip(("file", "shop"), sides):
                pairs = [f'"{name}": {show(side[name])}' for name in side]
                print(f"  {label}  {{{', '.join(pairs)}}}")
            differ = [name for name in sides[0]
                      if canon(sides[0][name]) != canon(sides[1][name])]
            print("  differ:" if differ else "  match", *differ)
            need(not differ, row["line"], "differs in", *differ)
        except (OSError, ValueError) as err:
            errors.append(err)
    for err in sorted(errors, key=lambda err: isinstance(err, OSError)):
        raise err
    return f"{len(drawn)} of {len(shop)} rows, seed {seed}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("replay")
    parser.add_argument("url")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    args = parser.parse_args()
    base, answers = args.url.rstrip("/"), []
    if args.rows < 1 or not re.fullmatch(URL, base):
        parser.error("--rows is 1 or more, the URL http(s)://host/path")
    try:
        rows, wrong = read(args.replay)
    except OSError as err:
        parser.error(f"the file cannot be opened: {err.strerror}")
    shop = [row for row in rows if row["shop"]]
    print(f"{len(rows)} rows: {len(shop)} to the shop")
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
        answers.append(word)
    here = base.split("/")[2]
    if any(row["url"].split("/")[2:3] != [here] for row in shop):
        print(f"note: not every row was recorded against {here}")
    code = 1 if "no" in answers else 3 if "?" in answers else 0
    verdict = {0: "complete", 1: "incomplete", 3: "not gradable"}[code]
    print("verdict:", verdict)
    sys.exit(code)


if __name__ == "__main__":
    main()
