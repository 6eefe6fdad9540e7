#!/usr/bin/env python3
"""Runs fnx-generate on one generated variant of the model and compares every logit with the numpy reference.

Usage: variants_test.py FNX_GENERATE VARIANT   (exit code 77: numpy is not installed)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support/reference"))
try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed")
    sys.exit(77)

from make_variant import LEAST_MARGIN, margin, write_variant
from model import Model
from safetensors_file import read_file
from variants import VARIANTS

MAX_TOKENS = 8
ATTEMPTS = 20
# Of the largest logit, and never more than the bound that holds for logits around 10.
RELATIVE_TOLERANCE = 5e-5
LARGEST_TOLERANCE = 5e-4
ARGMAX_MARGIN = 1e-3


def run_tool(tool, model, prompt, work):
    """-> the tensors that the tool wrote"""
    out, receipt = work / "logits.safetensors", work / "receipt.json"
    command = [tool, "--model", model.folder, "--backend", "cpu", "--token-ids", ",".join(map(str, prompt))]
    command += ["--max-tokens", MAX_TOKENS, "--ignore-eos", "--logits", out, "--logits-rows", "all"]
    command += ["--receipt", receipt] + (["--mtp-logits"] if model.has_mtp else [])
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {' '.join(map(str, command))}\n{done.stderr}")
    json.loads(receipt.read_text())
    return read_file(out)


def compare(name, ours, theirs):
    """Both [rows, vocab]; raises where they are further apart than fp32 explains."""
    if ours.shape != theirs.shape:
        raise AssertionError(f"{name}: the tool wrote {list(ours.shape)}, expected {list(theirs.shape)}")
    bound = min(RELATIVE_TOLERANCE * np.abs(theirs).max(), LARGEST_TOLERANCE)
    errors = np.abs(ours - theirs).max(axis=1)
    # A NaN is no match, so the rows within the bound are counted.
    wrong = np.flatnonzero(~(errors <= bound))
    print(f"{name}: {len(theirs)} rows, max abs error {errors.max():.1e}, bound {bound:.1e}")
    if len(wrong):
        raise AssertionError(f"{name}: rows {wrong[:8].tolist()} of {len(theirs)} are off by {errors[wrong[:8]]}")


def check_prompt(tool, model, prompt, work):
    """-> the least margin of the reference; compares only when that margin leaves no choice to rounding."""
    written = run_tool(tool, model, prompt, work)
    tokens = written["tokens"].values().reshape(-1).tolist()
    if tokens[: len(prompt)] != prompt or len(tokens) != len(prompt) + MAX_TOKENS:
        raise AssertionError(f"tokens are {tokens}, expected {MAX_TOKENS} after {prompt}")
    rows = model.forward(tokens[:-1])
    if margin(rows) < LEAST_MARGIN:
        return margin(rows)
    compare("logits", written["logits"].values(), rows.logits)
    if model.has_mtp:
        compare("mtp_logits", written["mtp_logits"].values(), rows.mtp_logits)
    for row in range(len(prompt) - 1, len(tokens) - 1):
        second, first = np.sort(rows.logits[row])[-2:]
        best = int(rows.logits[row].argmax())
        if first - second > ARGMAX_MARGIN and best != tokens[row + 1]:
            raise AssertionError(f"row {row} gives token {best} by {first - second:.4f}, the tool {tokens[row + 1]}")
    return margin(rows)


def main():
    tool, name = sys.argv[1:]
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "checkpoint"
            prompts = write_variant(VARIANTS[name], folder, attempt)
            model = Model(folder)
            least = min(check_prompt(tool, model, prompt, Path(work)) for prompt in prompts)
        if least >= LEAST_MARGIN:
            return 0
        print(f"drawn again: experts or blocks were chosen by a margin of {least:.1e}")
    print(f"{name}: no draw in {ATTEMPTS} keeps its choices clear of ties")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssertionError as error:
        print(f"FAIL {error}")
        sys.exit(1)
