#!/usr/bin/env python3
"""Holds the numpy reference to the golden data of the public implementations.

Usage: reference_test.py exl3|ngram|PROMPT   (a prompt of the golden data; exit code 77: numpy is not installed)
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support/reference"))
try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed")
    sys.exit(77)

import ngram
from exl3 import decode_trellis, pack_signs, unpack_signs
from model import Config, Model
from safetensors_file import read_file

GOLDEN = ROOT / "fixtures/golden"
CHECKPOINT = ROOT / "fixtures/flashnext-tiny"
LOGIT_TOLERANCE = 5e-4
HIDDEN_TOLERANCE = 1e-5  # relative to the largest element
DRAFT_MARGIN = 1e-3


def check(ok, text):
    print(("ok    " if ok else "FAIL  ") + text)
    return bool(ok)


def check_exl3():
    tensors = read_file(GOLDEN / "format-matrix.safetensors")
    ok = True
    for name in sorted(tensors):
        if not name.endswith(".trellis"):
            continue
        matrix = name.removesuffix(".trellis")
        decoded = decode_trellis(tensors[name].raw, matrix.split(".")[0])
        wrong = np.count_nonzero(decoded.view(np.uint16) != tensors[f"{matrix}.decoded"].raw.view(np.uint16))
        ok &= check(wrong == 0, f"{matrix}: {wrong} of {decoded.size} values differ")
    signs = np.where(np.random.default_rng(1).random(128) < 0.5, -1.0, 1.0)
    return ok & check(np.array_equal(unpack_signs(pack_signs(signs)), signs), "packed signs read back")


def check_ngram():
    golden = json.loads((GOLDEN / "golden-public.json").read_text())
    config = Config.load(CHECKPOINT)
    small = golden["ngram"]
    ok = check(ngram.multipliers(config, 0) == small["multipliers"], "multipliers")
    sizes = ngram.head_sizes(config, 0)
    ok &= check(sizes == small["sizes"] and ngram.head_offsets(sizes) == small["offsets"], "sizes and offsets")
    ok &= check(ngram.row_indices(config, 0, small["ids"]).tolist() == small["rows"], "rows")
    rows = ngram.hash_rows([7, 9, 11], 99, [3, 5, 7], [101, 103], [0, 101], 1)
    ok &= check(rows.tolist() == [[1, 124], [56, 136], [12, 162]], "rows of a hand-made hash")
    large = golden["ngram_real_config"]
    config.vocab_size, config.ngram_vocab_size_base = large["vocab_size"], large["base"]
    config.seed, config.ngram_heads = large["seed"], large["heads"]
    ok &= check(ngram.multipliers(config, 0) == large["multipliers"], "multipliers of the published pack")
    return ok & check(ngram.head_sizes(config, 0) == large["sizes"], "sizes of the published pack")


def check_prompt(name):
    tensors = read_file(GOLDEN / "golden-public.safetensors")
    golden = json.loads((GOLDEN / "golden-public.json").read_text())["prompts"][name]
    prompt, greedy = golden["prompt_ids"], golden["greedy_ids"]
    rows = Model(CHECKPOINT).forward(prompt + greedy[:-1])
    first = len(prompt) - 1
    ours = {"logits": rows.logits[first : first + 8], "prompt_logits": rows.logits[: len(prompt)]}
    ours["mtp_logits"] = rows.mtp_logits[-4:]
    ok = True
    for key, value in ours.items():
        if f"{name}.{key}" in tensors:
            error = np.abs(value - tensors[f"{name}.{key}"].values()).max()
            ok &= check(error <= LOGIT_TOLERANCE, f"{key}: max abs error {error:.2e}")
    ok &= check(rows.logits[first:].argmax(axis=1).tolist() == greedy, "greedy ids")
    second, best = np.sort(rows.mtp_logits, axis=1)[:, -2:].T
    clear = best - second > DRAFT_MARGIN
    same = rows.mtp_logits.argmax(axis=1) == np.array(golden["mtp_argmax"])
    ok &= check(same[clear].all(), f"draft argmax, {np.count_nonzero(clear)} of {len(clear)} rows clear")
    hidden = {f"hidden.{i}": x for i, x in enumerate(rows.hidden)}
    hidden.update({f"hidden.{len(rows.hidden)}": rows.mixed, "stack": rows.stack})
    for key, value in hidden.items():
        if f"{name}.{key}" in tensors:
            theirs = tensors[f"{name}.{key}"].values()
            error = np.abs(value.reshape(theirs.shape) - theirs).max() / np.abs(theirs).max()
            ok &= check(error <= HIDDEN_TOLERANCE, f"{key}: relative error {error:.2e}")
    return ok


if __name__ == "__main__":
    checks = {"exl3": check_exl3, "ngram": check_ngram}
    name = sys.argv[1]
    sys.exit(0 if (checks[name]() if name in checks else check_prompt(name)) else 1)
