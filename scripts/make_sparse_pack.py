#!/usr/bin/env python3
"""Writes a sparse stand-in for the published 4.05 bpw pack: right headers, index and configs, no data.

Usage: scripts/make_sparse_pack.py OUTDIR

304 113 tensors in 11 files that claim 107 GB and take about 100 MB of disk. Only the codebook markers and the n-gram
constants are written; every other byte is a hole that reads as zero. Needs a file system with sparse files.
"""

import json
import math
import os
import struct
import sys

HIDDEN, LAYERS, VOCAB, STREAMS, HC_RANK = 2560, 48, 248320, 4, 320
EXPERTS, EXPERT_SIZE = 512, 640
NGRAM_HEADS, NGRAM_DIM, NGRAM_BASE, NGRAM_BITS, NGRAM_DIVISOR = 16, 160, 20_000_000, 6, 128
SEED, NGRAM_SIZE = 1234, 3
SHARDS, TENSORS = 9, 304_113
MUL1 = 0x83DCD12D
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
SIZES = {"I16": 2, "F16": 2, "BF16": 2, "I32": 4, "I64": 8}


def linear(name, out, width, bits):
    yield name + ".mul1", "I32", []
    yield name + ".suh", "F16", [width]
    yield name + ".svh", "F16", [out]
    yield name + ".trellis", "I16", [width // 16, out // 16, 16 * bits]


def hyper_connection(name, inject=True):
    yield name + ".hc_norm.weight", "F16", [STREAMS * HIDDEN]
    yield name + ".input_mix_weight_down.weight", "F16", [HC_RANK, STREAMS * HIDDEN]
    yield name + ".input_mix_weight_up.weight", "F16", [STREAMS * HIDDEN, HC_RANK]
    if inject:
        yield name + ".block_inject_weight.weight", "F16", [STREAMS, STREAMS * HIDDEN]


def moe(name):
    for e in range(EXPERTS):
        yield from linear(f"{name}.experts.{e}.gate_proj", EXPERT_SIZE, HIDDEN, 4)
        yield from linear(f"{name}.experts.{e}.up_proj", EXPERT_SIZE, HIDDEN, 4)
        yield from linear(f"{name}.experts.{e}.down_proj", HIDDEN, EXPERT_SIZE, 4)
    yield from linear(name + ".shared_expert.gate_proj", EXPERT_SIZE, HIDDEN, 6)
    yield from linear(name + ".shared_expert.up_proj", EXPERT_SIZE, HIDDEN, 6)
    yield from linear(name + ".shared_expert.down_proj", HIDDEN, EXPERT_SIZE, 6)
    yield name + ".gate.weight", "F16", [EXPERTS, HIDDEN]
    yield name + ".shared_expert_gate.weight", "F16", [1, HIDDEN]


def linear_attention(name):
    yield from linear(name + ".in_proj_qkv", 10240, HIDDEN, 6)
    yield from linear(name + ".in_proj_z", 6144, HIDDEN, 6)
    yield from linear(name + ".out_proj", HIDDEN, 6144, 6)
    yield name + ".in_proj_a.weight", "F16", [48, HIDDEN]
    yield name + ".in_proj_b.weight", "F16", [48, HIDDEN]
    yield name + ".A_log", "BF16", [48]
    yield name + ".dt_bias", "BF16", [48]
    yield name + ".conv1d.weight", "BF16", [10240, 1, 4]
    yield name + ".norm.weight", "BF16", [128]


def sparse_attention(name):
    yield from linear(name + ".q_proj", 12288, HIDDEN, 6)
    yield from linear(name + ".k_proj", 512, HIDDEN, 6)
    yield from linear(name + ".v_proj", 512, HIDDEN, 6)
    yield from linear(name + ".o_proj", HIDDEN, 6144, 6)
    yield from linear(name + ".indexer.index_qk_proj", 640, HIDDEN, 4)
    yield name + ".q_norm.weight", "BF16", [256]
    yield name + ".k_norm.weight", "BF16", [256]
    yield name + ".indexer.q_layernorm.weight", "BF16", [128]
    yield name + ".indexer.k_layernorm.weight", "BF16", [128]


def layer(name, sparse):
    yield from sparse_attention(name + ".self_attn") if sparse else linear_attention(name + ".linear_attn")
    yield from moe(name + ".mlp")
    yield from hyper_connection(name + ".attn_hyper_connection")
    yield from hyper_connection(name + ".mlp_hyper_connection")


def ple(name):
    yield name + ".key_proj.weight", "F16", [STREAMS * HIDDEN, NGRAM_HEADS * NGRAM_DIM]
    yield name + ".value_proj.weight", "F16", [HIDDEN, NGRAM_HEADS * NGRAM_DIM]
    yield name + ".conv1d.weight", "F16", [STREAMS * HIDDEN, 1, 4]
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{name}.{norm}.weight", "F16", [STREAMS * HIDDEN]


def trunk():
    root = "model.language_model"
    yield root + ".embed_tokens.weight", "BF16", [VOCAB, HIDDEN]
    for i in range(LAYERS):
        yield from layer(f"{root}.layers.{i}", i % 4 == 3)
        if i == 1:
            yield from ple(f"{root}.layers.1.ple")
    yield from hyper_connection(root + ".hyper_connection_mixer", inject=False)
    yield from linear("lm_head", VOCAB, HIDDEN, 6)


def draft_head():
    yield from linear("mtp.fc_hidden", HIDDEN, HIDDEN, 5)
    yield from linear("mtp.fc_embedding", HIDDEN, HIDDEN, 5)
    yield "mtp.pre_fc_norm_hidden.weight", "F16", [STREAMS * HIDDEN]
    yield "mtp.pre_fc_norm_embedding.weight", "BF16", [HIDDEN]
    yield from layer("mtp.layers.0", True)
    yield from hyper_connection("mtp.hyper_connection_mixer", inject=False)


def table():
    rows = -(-sum(head_sizes()) // NGRAM_DIVISOR) * NGRAM_DIVISOR
    yield TABLE + ".head_offsets", "I64", [NGRAM_HEADS]
    yield TABLE + ".head_vocab_sizes", "I64", [NGRAM_HEADS]
    yield TABLE + ".layer_multipliers", "I64", [NGRAM_SIZE]
    yield TABLE + ".head_bias", "F16", [NGRAM_HEADS, NGRAM_DIM]
    yield TABLE + ".trellis", "I16", [rows, 1 + NGRAM_DIM * NGRAM_BITS // 16]


def vision(count):
    """Never loaded by the text model: a stand-in that brings the pack to its number of tensors."""
    for i in range(count):
        yield f"model.visual.blocks.{i // 36}.part_{i % 36}.weight", "F16", [1152, 128]


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def head_sizes():
    sizes, n = [], NGRAM_BASE - 1
    while len(sizes) < NGRAM_HEADS:
        n += 1
        if is_prime(n):
            sizes.append(n)
    return sizes


def multipliers():
    mask, golden, half = 2**64 - 1, 0x9E3779B97F4A7C15, max(1, (2**63 - 1) // VOCAB // 2)
    for i in range(NGRAM_SIZE):
        z = (SEED + golden * (i + 2)) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield 2 * ((z ^ (z >> 31)) % half) + 1


def constants():
    sizes = head_sizes()
    offsets = [sum(sizes[:i]) for i in range(NGRAM_HEADS)]
    return {
        TABLE + ".head_offsets": struct.pack("<16q", *offsets),
        TABLE + ".head_vocab_sizes": struct.pack("<16q", *sizes),
        TABLE + ".layer_multipliers": struct.pack("<3q", *multipliers()),
    }


def size_of(tensor):
    return math.prod(tensor[2]) * SIZES[tensor[1]]


def write_file(path, tensors, values):
    """Wider elements first, so that every tensor is aligned and the markers stand together."""
    header, offset, head = {"__metadata__": {"format": "pt"}}, 0, bytearray()
    for tensor in sorted(tensors, key=lambda t: (-SIZES[t[1]], t[1] == "I16")):
        name, dtype, shape = tensor
        size = size_of(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        if name.endswith(".mul1"):
            head += struct.pack("<I", MUL1)
        elif name in values:
            head += values[name]
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + head)
        out.truncate(8 + len(text) + offset)
    return offset


def config():
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)]
    text = {
        "model_type": "qwen4_exp_text", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "layer_types": kinds, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "moe_intermediate_size": EXPERT_SIZE,
        "shared_expert_intermediate_size": EXPERT_SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "eos_token_id": 248044, "hc_count": STREAMS, "hc_lowrank": HC_RANK,
        "ple_layer_ids": [2], "ple_embed_dim": NGRAM_HEADS * NGRAM_DIM, "ple_conv_kernel_size": 4,
        "ngram_size": NGRAM_SIZE, "heads_per_ngram": 8, "ngram_vocab_size_base": NGRAM_BASE,
        "make_ngram_vocab_size_divisible_by": NGRAM_DIVISOR, "seed": SEED, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
        "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "exl3", "bits": 4.05, "head_bits": 6, "codebook": "mul1"},
    }


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.strip())
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        sys.exit(f"{folder} is not empty")

    listed = list(trunk()) + list(draft_head())
    total, weight_map, values = 0, {}, constants()
    budget = sum(map(size_of, listed)) / SHARDS
    shards, filled = [[]], 0
    for tensor in listed:
        if filled >= budget * len(shards) and len(shards) < SHARDS:
            shards.append([])
        shards[-1].append(tensor)
        filled += size_of(tensor)
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        total += write_file(os.path.join(folder, name), tensors, values)
        weight_map.update((t[0], name) for t in tensors)
    write_json(os.path.join(folder, "model.safetensors.index.json"),
               {"metadata": {"total_size": total}, "weight_map": weight_map})

    side = list(table())
    pictures = list(vision(TENSORS - len(listed) - len(side)))
    total += write_file(os.path.join(folder, "ngram_embedding.safetensors"), side, values)
    total += write_file(os.path.join(folder, "vision.safetensors"), pictures, values)
    write_json(os.path.join(folder, "config.json"), config())
    write_json(os.path.join(folder, "generation_config.json"),
               {"eos_token_id": [248046, 248044], "bos_token_id": 248044})
    print(f"{folder}: {len(listed) + len(side) + len(pictures)} tensors, {total} bytes of data claimed")


if __name__ == "__main__":
    main()
