#!/usr/bin/env python3
"""Checks receipts against fixtures/receipt.schema.json and against what the schema cannot say.

Usage: receipt_validate.py FILE...          each file
       receipt_validate.py --folder FOLDER  every *.receipt.json below it; none at all is a failure
Exit code: 0 all valid, 1 a receipt is not, 2 usage or no jsonschema.
"""
import json
import math
import operator
import re
import sys
from pathlib import Path

from receipt_file import BLOCKS, Float, ReceiptError, canonical, load, xxh3

SCHEMA = Path(__file__).resolve().parent.parent / "fixtures" / "receipt.schema.json"
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
OUTCOME_CODES = {"passed": {0}, "failed": {1}, "interrupted": {130, 143}, "incomplete": {None},
                 "error": {2, 3, 4, 5, 6, 70}}
TIME_SUFFIX = re.compile(r"_(ns|us|ms|per_s)$")
ABSOLUTE = re.compile(r"(^|[\s'\"=(])/[^/\s'\"]+/")


def walk(value, path=""):
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from walk(inner, f"{path}[{i}]")


def percentile(samples, p):
    samples = sorted(samples)
    at = p / 100 * (len(samples) - 1)
    low = math.floor(at)
    high = min(low + 1, len(samples) - 1)
    return samples[low] + (samples[high] - samples[low]) * (at - low)


def check_series(series, where):
    samples = series["samples"]
    sound = bool(samples) and None not in samples
    for name, p in (("median", 50), ("p05", 5), ("p95", 95)):
        if not sound:
            if series[name] is not None or "reason" not in series:
                yield f"{where}.{name}: must be null, with a reason, without sound samples"
        elif series[name] is None or not math.isclose(series[name], percentile(samples, p), rel_tol=1e-9, abs_tol=1e-300):
            yield f"{where}.{name}: {series[name]} is not the samples' {percentile(samples, p)}"


def check_gate(gate, where):
    if gate["outcome"] == "not_run":
        return
    numbers = gate["observed"] is not None and gate["limit"] is not None
    passes = numbers and COMPARE[gate["comparator"]](gate["observed"], gate["limit"])
    if passes != (gate["outcome"] == "pass"):
        yield f"{where}: outcome {gate['outcome']} contradicts {gate['observed']} {gate['comparator']} {gate['limit']}"


def semantic_problems(receipt):
    if list(receipt) != BLOCKS:
        yield "blocks are not in the order of the schema"
    run = receipt["run"]
    if run["exit_code"] not in OUTCOME_CODES[run["outcome"]]:
        yield f"run: outcome {run['outcome']} with exit code {run['exit_code']}"
    if run["outcome"] == "passed" and any(gate["outcome"] == "fail" for gate in receipt["gates"]):
        yield "run: passed although a gate failed"
    if run["outcome"] in ("passed", "failed"):
        expected = xxh3(canonical(receipt["result"]).encode())
        if receipt["result_digest"] is None:
            yield "result_digest: missing from a finished run"
        elif expected is not None and expected != receipt["result_digest"]:
            yield f"result_digest: {receipt['result_digest']} but the result hashes to {expected}"
    elif receipt["result_digest"] is not None:
        yield f"result_digest: given although the run is {run['outcome']}"
    for i, series in enumerate(receipt["measurements"]):
        yield from check_series(series, f"measurements[{i}]")
    for i, gate in enumerate(receipt["gates"]):
        yield from check_gate(gate, f"gates[{i}]")
    for path, value in walk(receipt):
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
            yield f"{path}: {value} is beyond 2^53 and must be a string"
        if isinstance(value, Float) and not math.isfinite(value):
            yield f"{path}: {value.text} is not finite"
        if path.startswith("result.") and TIME_SUFFIX.search(path):
            yield f"{path}: a time in the result"
        if isinstance(value, str) and path.split(".")[0].split("[")[0] in ("invocation", "requested", "run", "tool"):
            if ABSOLUTE.search(value):
                yield f"{path}: absolute path {value!r}"


def problems(path, validator):
    try:
        receipt = load(path)
    except ReceiptError as error:
        return [str(error)]
    found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(receipt)]
    return found or list(semantic_problems(receipt))


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        import jsonschema
    except ImportError:
        print("receipt_validate.py: error: needs python3-jsonschema", file=sys.stderr)
        return 2
    if arguments[0] == "--folder":
        if len(arguments) != 2:
            print("receipt_validate.py: error: --folder takes one folder", file=sys.stderr)
            return 2
        files = sorted(Path(arguments[1]).rglob("*.receipt.json"))
        if not files:
            print(f"receipt_validate.py: error: no receipts below {arguments[1]}", file=sys.stderr)
            return 1
    else:
        files = arguments
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    validator.check_schema(validator.schema)
    bad = 0
    for file in files:
        found = problems(file, validator)
        bad += bool(found)
        for problem in found:
            print(f"{file}: {problem}")
    if xxh3(b"") is None:
        print("receipt_validate.py: result digests not verified: no libxxhash", file=sys.stderr)
    print(f"{len(files)} receipts, {bad} invalid")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
