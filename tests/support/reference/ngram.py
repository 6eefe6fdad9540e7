"""The hash of the n-gram embedding: which table rows a token and the tokens before it read."""

import numpy as np

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(value):
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def multipliers(config, ple_index):
    base = config.seed + 10007 * ple_index
    bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    return [2 * (splitmix64((base + GAMMA * (i + 1)) & MASK) % bound) + 1 for i in range(config.ngram_size)]


def is_prime(value):
    return value > 1 and all(value % d for d in range(2, int(value**0.5) + 1))


def head_sizes(config, ple_index):
    """Consecutive primes from the base on: the heads of all PLE layers share one run of primes."""
    heads = config.ngram_heads
    primes = []
    value = config.ngram_vocab_size_base
    while len(primes) < (ple_index + 1) * heads:
        if is_prime(value):
            primes.append(value)
        value += 1
    return primes[ple_index * heads :]


def head_offsets(sizes):
    return [sum(sizes[:i]) for i in range(len(sizes))]


def table_rows(config, sizes):
    divisor = config.make_ngram_vocab_size_divisible_by
    return -(-sum(sizes) // divisor) * divisor


def shifted_token(tokens, position, shift, eos):
    """The token `shift` back, or eos where that lies before the start or in an earlier segment."""
    for step in range(1, shift + 1):
        if position - step < 0 or tokens[position - step] == eos:
            return eos
    return tokens[position - shift]


def row_indices(config, ple_index, tokens):
    """-> int64 [tokens, heads]"""
    factors = multipliers(config, ple_index)
    sizes = head_sizes(config, ple_index)
    return hash_rows(tokens, config.ngram_eos, factors, sizes, head_offsets(sizes), config.heads_per_ngram)


def hash_rows(tokens, eos, factors, sizes, offsets, heads_per_ngram):
    result = []
    for position, token in enumerate(tokens):
        rows = []
        mix = token * factors[0]
        for order in range(2, len(factors) + 1):
            mix ^= shifted_token(tokens, position, order - 1, eos) * factors[order - 1]
            # 64-bit wrap-around of a signed product.
            signed = (mix & MASK) - (1 << 64 if mix & (1 << 63) else 0)
            first = (order - 2) * heads_per_ngram
            rows += [signed % sizes[i] + offsets[i] for i in range(first, first + heads_per_ngram)]
        result.append(rows)
    return np.array(result, np.int64)
