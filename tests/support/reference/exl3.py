"""EXL3 weights in numpy, read from the format's description alone: trellis tiles, quantized linears, n-gram rows."""

import functools

import numpy as np

MUL1 = 0x83DCD12D
MCG = 0xCBAC1FED
CODEBOOKS = ("3inst", "mcg", "mul1")


@functools.cache
def codebook_table(codebook):
    """fp16 value of each of the 65536 states."""
    state = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        product = state * np.uint32(MUL1)
        byte_sum = sum((product >> np.uint32(8 * i)) & np.uint32(0xFF) for i in range(4))
        scale, shift = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return ((1024.0 + byte_sum) * scale + shift).astype(np.float16)
    if codebook == "3inst":
        word = state * np.uint32(89226354) + np.uint32(64248484)
    elif codebook == "mcg":
        word = state * np.uint32(MCG)
    else:
        raise ValueError(f"unknown codebook {codebook}")
    word = (word & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    low, high = (half.astype(np.uint16).view(np.float16) for half in (word & np.uint32(0xFFFF), word >> np.uint32(16)))
    return low + high


@functools.cache
def tile_layout():
    """Row and column, inside a 16x16 tile, of each of its 256 values."""
    lane, j = np.divmod(np.arange(256), 8)
    return 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1), lane // 4 + 8 * (j >> 2)


def decode_trellis(trellis, codebook):
    """trellis int16 [K/16, N/16, words] -> fp16 [K, N]."""
    tile_rows, tile_columns, words = trellis.shape
    half_bits = words // 8
    if words % 8 or not (1 <= half_bits / 2 <= 8) or (half_bits % 2 and (codebook != "mul1" or half_bits > 7)):
        raise ValueError(f"no width of {codebook} has {words} words a tile")
    p = np.arange(256)
    if half_bits % 2 == 0:
        end = (p + 1) * (half_bits // 2)
    else:
        end = ((p + 1) * half_bits - (p + 1) % 2) // 2
    ring = words * 16
    word, shift = np.divmod((end - 16) % ring, 32)
    stream = np.ascontiguousarray(trellis).view("<u4").astype(np.uint64).reshape(-1, words // 2)
    window = (stream[:, word] << np.uint64(32)) | stream[:, (word + 1) % (words // 2)]
    states = (window >> (48 - shift).astype(np.uint64)) & np.uint64(0xFFFF)
    tiles = np.empty((len(stream), 16, 16), np.float16)
    row, column = tile_layout()
    tiles[:, row, column] = codebook_table(codebook)[states]
    tiles = tiles.reshape(tile_rows, tile_columns, 16, 16)
    return tiles.transpose(0, 2, 1, 3).reshape(tile_rows * 16, tile_columns * 16)


def block_hadamard(x):
    """Each block of 128 along the last axis times the Sylvester matrix over sqrt(128), by butterflies."""
    shape = x.shape
    for step in (1, 2, 4, 8, 16, 32, 64):
        x = x.reshape(-1, 2, step)
        x = np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1)
    return x.reshape(shape) / np.sqrt(128)


def unpack_signs(words):
    """int16 [n/16] -> [n] of +1 and -1, low bit first, a set bit is -1."""
    bits = (words.astype(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16)) & 1
    return 1.0 - 2.0 * bits.reshape(-1)


def pack_signs(signs):
    """The inverse of unpack_signs."""
    bits = (np.asarray(signs).reshape(-1, 16) < 0).astype(np.uint16)
    return (bits << np.arange(16, dtype=np.uint16)).sum(axis=1).astype(np.uint16).view(np.int16)


def find_codebook(tensors, prefix):
    markers = [name for name in ("mul1", "mcg") if f"{prefix}.{name}" in tensors]
    if len(markers) > 1:
        raise ValueError(f"{prefix} has two codebook markers")
    if not markers:
        return "3inst"
    marker = tensors[f"{prefix}.{markers[0]}"].raw.reshape(-1)
    expected = MUL1 if markers[0] == "mul1" else MCG
    if marker.size and int(marker[0]) & 0xFFFFFFFF != expected:
        raise ValueError(f"{prefix}.{markers[0]} is {int(marker[0]):#x}")
    return markers[0]


class Exl3Linear:
    """y = ((((x * suh) H) Wq) H) * svh + bias"""

    def __init__(self, tensors, prefix):
        trellis = tensors[f"{prefix}.trellis"].raw
        self.weight = decode_trellis(trellis, find_codebook(tensors, prefix)).astype(np.float64)
        self.suh = self._scales(tensors, prefix, "su")
        self.svh = self._scales(tensors, prefix, "sv")
        bias = tensors.get(f"{prefix}.bias")
        self.bias = 0.0 if bias is None else bias.values()

    @staticmethod
    def _scales(tensors, prefix, name):
        if f"{prefix}.{name}h" in tensors:
            return tensors[f"{prefix}.{name}h"].values()
        return unpack_signs(tensors[f"{prefix}.{name}"].raw)

    def __call__(self, x):
        return block_hadamard(block_hadamard(x * self.suh) @ self.weight) * self.svh + self.bias


class PlainLinear:
    def __init__(self, tensors, prefix):
        self.weight = tensors[f"{prefix}.weight"].values()
        bias = tensors.get(f"{prefix}.bias")
        self.bias = 0.0 if bias is None else bias.values()

    def __call__(self, x):
        return x @ self.weight.T + self.bias


def decode_ngram_rows(rows, dim):
    """int16 [count, 1 + dim*K/16] -> float64 [count, dim], without the head bias."""
    scale = np.ascontiguousarray(rows[:, :1]).view(np.float16).astype(np.float64)
    bits = (rows.shape[1] - 1) * 16 // dim
    if bits * dim != (rows.shape[1] - 1) * 16:
        raise ValueError(f"{rows.shape[1]} words do not hold rows of {dim}")
    payload = np.ascontiguousarray(rows[:, 1:]).astype("<i2").view(np.uint8)
    stream = np.unpackbits(payload, axis=1, bitorder="little").astype(np.int64)
    m = np.arange(16)
    position = ((np.arange(dim)[:, None] - m // bits) % dim) * bits + m % bits
    states = (stream[:, position] << m).sum(axis=2)
    return codebook_table("mul1")[states].astype(np.float64) * scale
