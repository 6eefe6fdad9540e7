#!/usr/bin/env python3
"""The measurements of scripts/bench_cpu.sh. Usage: scripts/bench_cpu.py BIN_DIR

Each figure is the median of several runs; the range of the runs stands beside it.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "fixtures", "flashnext-tiny")
MIB, GIB = 1 << 20, 1 << 30
MODEL_RUNS, INSPECT_RUNS, PAIRS = 5, 3, 8
TEXT_TENSORS, VISION_TENSORS = 303_126, 987  # of the published 4.05 bpw pack
FILES, FILE_BYTES, TENSOR_BYTES = 4, 256 * MIB, 2 * MIB

failed = False


def report(name, samples, unit, comparator, limit):
    """Prints one figure with its limit and remembers a miss."""
    global failed
    value = statistics.median(samples)
    passed = {"<": value < limit, ">=": value >= limit}[comparator]
    failed = failed or not passed
    spread = f"{min(samples):.4g} .. {max(samples):.4g}, {len(samples)} runs"
    print(f"{'pass' if passed else 'FAIL'}  {name:<34} {value:8.4g} {unit:<8} limit {comparator} {limit:g}  ({spread})", flush=True)


def run(command, folder):
    """Runs a tool; returns its receipt, wall seconds and peak memory."""
    receipt = os.path.join(folder, "receipt.json")
    began = time.monotonic()
    process = subprocess.Popen([*command, "--receipt", receipt, "-q"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    code = process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
    if code != 0:
        sys.exit(f"bench_cpu: {os.path.basename(command[0])} ended with exit code {code}")
    with open(receipt, encoding="utf-8") as file:
        return json.load(file), wall, usage.ru_maxrss * 1024


def series(receipt, name):
    return sum(next(m["samples"] for m in receipt["measurements"] if m["name"] == name)) / 1e9


def bench_model(bin_dir, folder):
    with open(os.path.join(ROOT, "fixtures", "golden", "golden-public.json"), encoding="utf-8") as file:
        prompts = json.load(file)["prompts"]
    generate = [os.path.join(bin_dir, "fnx-generate"), "--model", MODEL, "--backend", "cpu", "--ignore-eos", "--token-ids"]

    def generated(name, tokens):
        ids = ",".join(map(str, prompts[name]["prompt_ids"]))
        return run([*generate, ids, "--max-tokens", str(tokens)], folder)[0]

    decoding = [generated("capital", 257) for _ in range(MODEL_RUNS)]
    report("decode", [r["evidence"]["decode_rows"] / series(r, "decode_forward_ns") for r in decoding], "tokens/s", ">=", 200)
    reading = [generated("long-1500", 1) for _ in range(MODEL_RUNS)]
    for r in reading:
        assert r["evidence"]["prompt_rows"] == 1500
    report("prompt of 1500 tokens", [series(r, "prompt_forward_ns") for r in reading], "s", "<", 4)
    report("load", [series(r, "load_ns") for r in decoding + reading], "s", "<", 1)


def add_vision(pack, count):
    """A sparse side file of tensors that the text model never loads, as the published packs have one."""
    size = 1152 * 128 * 2
    header = json.dumps({f"model.visual.blocks.{i // 36}.part_{i % 36}.weight":
                         {"dtype": "F16", "shape": [1152, 128], "data_offsets": [i * size, (i + 1) * size]}
                         for i in range(count)}).encode()
    with open(os.path.join(pack, "vision.safetensors"), "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + count * size)


def bench_inspect(bin_dir, folder):
    pack = os.path.join(folder, "pack")
    run([os.path.join(bin_dir, "fnx-synth"), "--model", "synth:flash-next-4.05bpw", "--sparse", "--out", pack], folder)
    add_vision(pack, VISION_TENSORS)
    runs = [run([os.path.join(bin_dir, "fnx-inspect"), "--model", pack], folder) for _ in range(INSPECT_RUNS)]
    for r, _, _ in runs:
        assert r["result"]["tensors"] == TEXT_TENSORS + VISION_TENSORS, r["result"]
    report("inspect 304 113 tensors: wall time", [wall for _, wall, _ in runs], "s", "<", 5)
    report("inspect 304 113 tensors: memory", [peak / GIB for _, _, peak in runs], "GiB", "<", 1)


def make_files(folder):
    """Safetensors files of 2 MiB tensors, about the size of an expert's trellis."""
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
        out.write("{}")
    count = FILE_BYTES // TENSOR_BYTES
    block = random.Random(1).randbytes(TENSOR_BYTES)
    for f in range(FILES):
        header = json.dumps({f"file{f}.tensor{i}": {"dtype": "U8", "shape": [TENSOR_BYTES],
                                                    "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES]}
                             for i in range(count)}).encode()
        with open(os.path.join(folder, f"part{f}.safetensors"), "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for _ in range(count):
                out.write(block)


def read_files(paths):
    """Plain reading: one file after the other, 1 MiB at a time into one buffer. Returns bytes a second."""
    buffer = bytearray(MIB)
    total, began = 0, time.monotonic()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total / (time.monotonic() - began)


def bench_fingerprint(bin_dir, folder):
    files = os.path.join(folder, "files")
    make_files(files)
    paths = [os.path.join(files, name) for name in sorted(os.listdir(files)) if name.endswith(".safetensors")]
    total = sum(map(os.path.getsize, paths))
    command = [os.path.join(bin_dir, "fnx-fingerprint"), "--model", files, "--no-cache"]

    def hash_files():
        receipt, wall, _ = run(command, folder)
        assert receipt["evidence"]["tensors_hashed"] == FILES * (FILE_BYTES // TENSOR_BYTES)
        return total / wall

    read_files(paths)
    hash_files()
    ratios, rates = [], []
    for pair in range(PAIRS):
        if pair % 2 == 0:
            reading = read_files(paths)
            hashing = hash_files()
        else:
            hashing = hash_files()
            reading = read_files(paths)
        ratios.append(hashing / reading)
        rates.append((hashing / GIB, reading / GIB))
    report("fingerprint, share of read rate", ratios, "", ">=", 0.6)
    hashing, reading = (statistics.median(side) for side in zip(*rates))
    print(f"      fingerprint {hashing:.2f} GiB/s, plain reading {reading:.2f} GiB/s, {total / GIB:.2f} GiB of warm files")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    bin_dir = sys.argv[1]
    devices = subprocess.run([os.path.join(bin_dir, "fnx-generate"), "--list-devices"], check=True, capture_output=True, text=True)
    print(f"{devices.stdout.splitlines()[0]}; load average before the run {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        bench_model(bin_dir, folder)
        bench_inspect(bin_dir, folder)
        bench_fingerprint(bin_dir, folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
