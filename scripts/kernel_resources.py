#!/usr/bin/env python3
"""Holds every compiled CUDA kernel to its record's limits, on each architecture that the build is for.

Usage: kernel_resources.py CONTRACT_TOOL LIBRARY [--list]

Reads the cubins inside LIBRARY (an archive, object or program with fat binaries) and the records that
`CONTRACT_TOOL --list` prints. No GPU takes part, so this is what can be said of an architecture that is not at hand:
registers, static shared memory, stack and local memory of every kernel stay within its record, and the records within
what a block may have: 65536 registers by threads and 99 KiB of shared memory. Exit code 1 when one does not, 77 when the
library holds no cubin.
"""
import re
import struct
import subprocess
import sys

FATBIN = 0xBA55ED50
KIND_CUBIN = 2
COMPRESSED = 0x2000 | 0x8000
INFO_FRAME, INFO_REGISTERS = 0x11, 0x2F
MOST_REGISTERS, MOST_SHARED = 65536, 99 * 1024
RESERVED_SHARED = 1024  # of every block, by the driver; a kernel's shared section begins with it
MEASURING = "_kernel_bench_cu_"  # kernels that only the benchmark launches


def cubins(data):
    """Yields (architecture, bytes) of every cubin of the fat binaries in `data`."""
    at = data.find(struct.pack("<I", FATBIN))
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header, at + header + size
        while entry < end and end <= len(data):
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            if kind == KIND_CUBIN:
                architecture, = struct.unpack_from("<I", data, entry + 28)
                flags, = struct.unpack_from("<Q", data, entry + 40)
                if flags & COMPRESSED:
                    raise SystemExit(f"sm_{architecture}: a compressed cubin, which this script does not read")
                yield architecture, data[entry + header:entry + header + size]
            entry += header + size
        at = data.find(struct.pack("<I", FATBIN), max(entry, at + 4))


def kernels(cubin):
    """{mangled name: {"registers", "stack", "static_shared", "local"}} of one cubin."""
    offset, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQII", cubin, offset + i * size) for i in range(count)]

    def text(table, at):
        start = table[4] + at
        return cubin[start:cubin.index(b"\0", start)].decode()

    names = sections[names]
    by_name = {text(names, s[0]): s for s in sections}
    found = {}
    for name, section in by_name.items():
        if name.startswith(".text."):
            kernel = name[len(".text."):]
            shared, local = by_name.get(".nv.shared." + kernel), by_name.get(".nv.local." + kernel)
            found[kernel] = {"registers": 0, "stack": 0, "local": local[5] if local else 0,
                             "static_shared": max(0, shared[5] - RESERVED_SHARED) if shared else 0}
    symbols = next(s for s in sections if s[1] == 2)
    info = by_name.get(".nv.info")
    at, end = (info[4], info[4] + info[5]) if info else (0, 0)
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if form == 4 and attribute in (INFO_FRAME, INFO_REGISTERS):
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            word, = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            kernel = text(sections[symbols[6]], word)
            if kernel in found:
                found[kernel]["registers" if attribute == INFO_REGISTERS else "stack"] = value
        at += 4 + (length if form == 4 else 0)
    return found


RECORD = re.compile(r"  symbol   (\S+): (\d+) threads, (\d+) registers, (\d+) \+ (\d+) bytes of shared memory, (\d+) local")


def records(tool):
    listing = subprocess.run([tool, "--list"], check=True, capture_output=True, text=True).stdout
    keys = "threads", "registers", "static_shared", "dynamic_shared", "local"
    return {m[1]: dict(zip(keys, map(int, m.groups()[1:]))) for m in RECORD.finditer(listing)}


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    limits = records(sys.argv[1])
    with open(sys.argv[2], "rb") as file:
        data = file.read()
    wrong, seen, checked = [], {}, {}
    for architecture, cubin in cubins(data):
        for mangled, used in kernels(cubin).items():
            if MEASURING in mangled:
                continue
            # A mangled name holds each identifier after its length.
            name = next((n for n in limits if f"{len(n)}{n}" in mangled), None)
            where = f"sm_{architecture} {mangled}"
            if "--list" in sys.argv:
                print(where, used)
            if name is None:
                wrong.append(f"{where}: no record")
                continue
            checked[architecture] = checked.get(architecture, 0) + 1
            seen.setdefault(architecture, set()).add(name)
            limit = limits[name]
            for key, is_, most in (
                    ("registers", used["registers"], limit["registers"]),
                    ("bytes of static shared memory", used["static_shared"], limit["static_shared"]),
                    ("bytes of local memory", used["stack"] + used["local"], limit["local"]),
                    ("registers a block", -(-used["registers"] // 8) * 8 * limit["threads"], MOST_REGISTERS),
                    ("bytes of shared memory", used["static_shared"] + limit["dynamic_shared"], MOST_SHARED)):
                if is_ > most:
                    wrong.append(f"{where}: {is_} {key}, at most {most}")
    if not seen:
        print(f"{sys.argv[2]} holds no cubin")
        return 77
    for architecture, names in seen.items():
        wrong += [f"sm_{architecture}: no kernel named {name}" for name in sorted(limits.keys() - names)]
    for line in wrong:
        print(line)
    held = ", ".join(f"{n} of sm_{a}" for a, n in sorted(checked.items()))
    print(f"kernels held to their records: {held}; {len(wrong)} beyond")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
