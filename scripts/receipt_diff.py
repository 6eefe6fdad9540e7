#!/usr/bin/env python3
"""Compares two receipts. Prints every difference with its JSON path.

Usage: receipt_diff.py [--all] A B
Compared are schema, subjects, requested, effective, result, result_digest and the outcomes of gates: what a rerun must
repeat. --all compares everything. A hash that one side lacks is never equal: it is reported as unverified.
Exit code: 0 equal, 1 different or unverified, 2 usage or unreadable.
"""
import sys

from receipt_file import BLOCKS, Float, ReceiptError, load

ABSENT = object()
HASH_KEYS = {"fingerprint", "digest", "result_digest"}
REPEATED = ["schema", "subjects", "requested", "effective", "result", "result_digest"]


def text(value):
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, Float):
        return value.text
    shown = repr(value)
    return shown if len(shown) <= 120 else shown[:117] + "..."


def is_hash(key):
    return key in HASH_KEYS or key.endswith(("_hash", "_sha256", "_xxh3", "_digest"))


def differences(a, b, path, ignore_origin):
    key = path.rsplit(".", 1)[-1].split("[")[0]
    if is_hash(key) and (a in (None, ABSENT) or b in (None, ABSENT)):
        yield "unverified", path, a, b
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for name in list(a) + [n for n in b if n not in a]:
            if ignore_origin and key == "fingerprint" and name == "origin":
                continue
            yield from differences(a.get(name, ABSENT), b.get(name, ABSENT), f"{path}.{name}" if path else name, ignore_origin)
        return
    if isinstance(a, list) and isinstance(b, list):
        for i in range(max(len(a), len(b))):
            yield from differences(a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT, f"{path}[{i}]", ignore_origin)
        return
    same = a.text == b.text if isinstance(a, Float) and isinstance(b, Float) else type(a) is type(b) and a == b
    if not same:
        yield "different", path, a, b


def compare(a, b, everything):
    blocks = BLOCKS if everything else REPEATED
    for block in blocks:
        yield from differences(a.get(block, ABSENT), b.get(block, ABSENT), block, not everything)
    for i, subject in enumerate(a.get("subjects", [])):
        if "fingerprint" not in subject and i < len(b.get("subjects", [])) and "fingerprint" not in b["subjects"][i]:
            yield "unverified", f"subjects[{i}].fingerprint", ABSENT, ABSENT
    if not everything:
        outcomes = [{gate["name"]: gate["outcome"] for gate in receipt.get("gates", [])} for receipt in (a, b)]
        yield from differences(outcomes[0], outcomes[1], "gates", True)


def main(arguments):
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    everything = "--all" in arguments
    files = [word for word in arguments if word != "--all"]
    if len(files) != 2 or any(word.startswith("-") for word in files):
        print("receipt_diff.py: error: give two receipts; --help shows the usage", file=sys.stderr)
        return 2
    receipts = []
    for file in files:
        try:
            receipts.append(load(file))
        except ReceiptError as error:
            print(f"receipt_diff.py: error: {file}: {error}", file=sys.stderr)
            return 2
    found = list(compare(*receipts, everything))
    for kind, path, a, b in found:
        print(f"{kind}: {path}: {text(a)} | {text(b)}")
    if not found:
        print("equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
