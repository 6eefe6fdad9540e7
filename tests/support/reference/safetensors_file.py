"""Reads and writes safetensors files with numpy alone. A tensor is a Tensor: dtype name, shape and raw array."""

import json
import struct
from pathlib import Path

import numpy as np

# BF16 has no numpy type: its raw array holds the 16-bit words.
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}


class Tensor:
    def __init__(self, dtype, raw):
        self.dtype = dtype
        self.raw = raw

    @property
    def shape(self):
        return self.raw.shape

    @classmethod
    def make(cls, dtype, values):
        """values rounded to dtype, to nearest even."""
        values = np.asarray(values)
        if dtype != "BF16":
            return cls(dtype, values.astype(NUMPY_TYPES[dtype]))
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").reshape(values.shape).astype(np.uint64)
        return cls(dtype, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))

    def values(self):
        """Integers as they are, everything else as float64, exactly."""
        if self.dtype == "BF16":
            return (self.raw.astype("<u4") << 16).view("<f4").astype(np.float64)
        return self.raw.astype(np.float64) if self.dtype[0] == "F" else self.raw


def read_file(path):
    """-> {name: Tensor}"""
    data = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in NUMPY_TYPES:
            continue
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data[8 + length + begin : 8 + length + end], NUMPY_TYPES[entry["dtype"]])
        tensors[name] = Tensor(entry["dtype"], raw.reshape(entry["shape"]))
    return tensors


def read_folder(folder):
    """Every tensor of every *.safetensors file of a checkpoint folder."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(read_file(path))
    return tensors


def write_file(path, tensors, metadata=None):
    """Writes {name: Tensor}, largest elements first, so that every tensor is aligned to its element."""
    header = {"__metadata__": metadata} if metadata else {}
    offset = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].raw.itemsize, item[0]))
    for name, tensor in ordered:
        size = tensor.raw.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            out.write(np.ascontiguousarray(tensor.raw).tobytes())
