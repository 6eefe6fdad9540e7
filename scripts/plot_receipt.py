#!/usr/bin/env python3
"""Draws receipts of fnx-prefill-sweep, fnx-graph-ab and fnx-expert-profile export as PNG.

Usage: plot_receipt.py RECEIPT [--out FILE.png]

A sweep becomes rows a second over the chunk size, one line a length: warm medians with the range of their samples, the
cold run as a cross. An A/B receipt becomes the ratios off / on of every pair, cell by cell, with median and interval.
An export becomes a heat map of layers x experts: how often each was chosen, 1 where all are chosen equally often.
The picture stands beside the receipt unless --out says otherwise. Exit code: 0, 2 for a receipt that cannot be drawn, 4
without matplotlib (Debian package python3-matplotlib).
"""
import argparse
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from receipt_file import ReceiptError, load  # noqa: E402


def fail(why, code=2):
    print(f"plot_receipt.py: {why}", file=sys.stderr)
    sys.exit(code)


def sweep_lines(receipt):
    """{length: {chunk: {phase: rows a second of each run}}}"""
    lines = {}
    for series in receipt["measurements"]:
        match = re.fullmatch(r"tokens(\d+)/chunk(\d+)/ttft_ns", series["name"])
        if not match:
            continue
        length, chunk = map(int, match.groups())
        rates = [length / ns * 1e9 for ns in series["samples"]]
        lines.setdefault(length, {}).setdefault(chunk, {})[series["phase"]] = rates
    return lines


def ab_ratios(receipt):
    """{cell: (ratios, interval or None)}"""
    cells = {}
    for series in receipt["measurements"]:
        match = re.fullmatch(r"((?:decode|prefill)/c\d+)/ratio", series["name"])
        if match:
            cell = match.group(1)
            cells[cell] = (series["samples"], receipt["evidence"].get(cell, {}).get("ratio_interval"))
    return cells


def expert_heat(receipt):
    """[layers][experts], each layer's mean 1; empty for another receipt."""
    heat = []
    for counts in receipt["result"].get("counts", []):
        counts = [int(count) for count in counts]
        mean = sum(counts) / len(counts) or 1
        heat.append([count / mean for count in counts])
    return heat


def draw_sweep(axes, lines):
    for length, chunks in sorted(lines.items()):
        sizes = sorted(chunks)
        warm = [chunks[c].get("warm", []) for c in sizes]
        medians = [statistics.median(w) if w else float("nan") for w in warm]
        below = [m - min(w) if w else 0 for m, w in zip(medians, warm)]
        above = [max(w) - m if w else 0 for m, w in zip(medians, warm)]
        drawn = axes.errorbar(sizes, medians, yerr=[below, above], marker="o", capsize=3, label=f"{length} tokens")
        cold = [(c, rate) for c in sizes for rate in chunks[c].get("cold", [])]
        axes.plot([c for c, _ in cold], [r for _, r in cold], "x", color=drawn.lines[0].get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows of a chunk")
    axes.set_ylabel("rows / s (x: cold)")
    axes.legend()


def draw_ab(axes, cells):
    for place, (ratios, interval) in enumerate(cells.values()):
        axes.plot([place] * len(ratios), ratios, ".", color="tab:gray")
        axes.plot([place], [statistics.median(ratios)], "o", color="tab:blue")
        if interval:
            axes.vlines(place, interval[0], interval[1], color="tab:blue")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)))
    axes.set_xticklabels(cells)
    axes.set_ylabel("time without graphs / time with")


def draw_heat(figure, axes, heat, trunk_layers):
    image = axes.imshow(heat, aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    figure.colorbar(image, ax=axes, label="choices / even share")
    if trunk_layers < len(heat):
        axes.axhline(trunk_layers - 0.5, color="white", linewidth=0.8)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer (below the line: draft head)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("receipt")
    parser.add_argument("--out")
    options = parser.parse_args()
    try:
        receipt = load(options.receipt)
        tool = receipt["tool"]["name"]
        outcome = receipt["run"]["outcome"]
        lines, cells, heat = sweep_lines(receipt), ab_ratios(receipt), expert_heat(receipt)
        trunk_layers = receipt["result"].get("layers")
    except ReceiptError as error:
        fail(f"{options.receipt}: {error}")
    except (KeyError, TypeError, AttributeError) as error:
        fail(f"{options.receipt}: the receipt lacks {error}")
    if not lines and not cells and not heat:
        fail(f"{options.receipt}: a receipt of {tool} without anything to draw; fnx-prefill-sweep, fnx-graph-ab and "
             "fnx-expert-profile export have some")
    try:
        import matplotlib
    except ImportError:
        fail("matplotlib is missing; install python3-matplotlib", 4)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    gpus = receipt["platform"]["gpus"]
    backend = receipt["effective"].get("backend", {}).get("value")
    device = gpus[0]["name"] if backend == "cuda" and gpus else receipt["platform"]["cpu"]["name"]
    models = [s["name"] for s in receipt["subjects"] if s["role"] in ("checkpoint", "profile")]
    axes.set_title(f"{tool}, {outcome}\n{', '.join(models)}; {device}", fontsize="small")
    if heat:
        draw_heat(figure, axes, heat, trunk_layers)
    elif lines:
        draw_sweep(axes, lines)
    else:
        draw_ab(axes, cells)
    figure.tight_layout()
    out = options.out or os.path.splitext(options.receipt)[0] + ".png"
    try:
        figure.savefig(out)
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    print(out)


if __name__ == "__main__":
    main()
