#!/usr/bin/env python3
"""Makes the README's kernel table from a receipt of fnx-kernel-bench.

Usage: kernel_table.py [--rows 1,16,4096] RECEIPT
Prints markdown: a line with the card and its ceilings, then one row a matrix and one column a width with microseconds at each
row count and, for one row, the multiple of the floor (the larger of bytes over the read rate and values over the decode rate).
A second table has the operations of a decode round, one column a row count with microseconds and their floor.
Exit code: 0, or 2 when the receipt is unreadable or holds no figures.
"""
import argparse
import json
import sys


def fail(why):
    print(f"kernel_table.py: {why}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,4096")
    parser.add_argument("receipt")
    options = parser.parse_args()
    try:
        with open(options.receipt, encoding="utf-8") as file:
            receipt = json.load(file)
        cases = {c["name"]: c for c in receipt["result"]["cases"]}
        times = {m["name"]: m["median"] for m in receipt["measurements"] if m["phase"] == "cold"}
        warm = {m["name"]: m["median"] for m in receipt["measurements"] if m["phase"] == "warm"}
        device = receipt["effective"]["device"]["value"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{options.receipt}: {error}")
    wanted = options.rows.split(",")

    def rate(name, key, series):
        return cases[name][key] / series[name] if name in cases and series.get(name) else 0.0

    read = rate("ceiling/read", "moved_bytes", times)
    mma = rate("ceiling/mma", "flops", warm)
    decode = max([rate(n, "trellis_values", warm) for n in cases if n.startswith("ceiling/decode/")] or [0.0])
    if not read or not decode:
        fail(f"{options.receipt}: no ceilings were measured")
    print(f"{device}: read {read / 1e3:.0f} GB/s, trellis decode {decode / 1e6:.2f}e12 values/s, "
          f"mma {mma / 1e6:.0f} TFLOP/s; microseconds, weights from memory.\n")
    parts = [name.split("/") for name in times]
    cells = list(dict.fromkeys(tuple(p[:3]) for p in parts if len(p) == 4))
    widths = list(dict.fromkeys(bits for _, _, bits in cells))

    def cell(kernel, book, bits):
        names = [f"{kernel}/{book}/{bits}/rows{r}" for r in wanted]
        one = f"{kernel}/{book}/{bits}/rows1"
        text = " / ".join(f"{times[n]:.1f}" if times.get(n) is not None else "-" for n in names)
        if not times.get(one):
            return text
        floor = max(cases[one]["moved_bytes"] / read, cases[one]["trellis_values"] / decode)
        return f"{text}, {times[one] / floor:.2f} x"

    if cells:
        print("| kernel | " + " | ".join(f"{w} bits" for w in widths) + " |")
        print("| --- |" + " ---: |" * len(widths))
    for kernel, book in dict.fromkeys(c[:2] for c in cells):
        row = [cell(kernel, book, w) if (kernel, book, w) in cells else "" for w in widths]
        print(f"| {kernel} | " + " | ".join(row) + " |")

    parts = [name.split("/") for name in cases if name.startswith("operation/")]
    columns = [r for r in wanted if any(p[2] == f"rows{r}" for p in parts)]
    if not columns:
        return
    print("\n| operation: us, floor us | " + " | ".join(f"rows {r}" for r in columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for operation in dict.fromkeys(p[1] for p in parts):
        row = []
        for name in (f"operation/{operation}/rows{r}" for r in columns):
            us = times.get(name, warm.get(name))
            row.append("-" if us is None else f"{us:.1f}, {cases[name]['moved_bytes'] / read:.2f}")
        print(f"| {operation} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
