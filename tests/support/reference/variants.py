"""The named variants: each takes one liberty that the checkpoint format or the model's config allows.

A spec is merged into BASE. `text` overrides text_config (null removes a key). `rules` are [pattern, form] pairs, the
first pattern found in a tensor prefix wins; a form is {"plain": DTYPE} or {"codebook", "bits", "signs", "marker"},
either with "bias"; a list of bits is dealt out in turn. `table` says how n-gram tables are stored, `layout` how files
are cut.
"""

import copy

QUANTIZED = r"in_proj_qkv|in_proj_z|out_proj|[qkvo]_proj$|index_qk_proj|expert.*_proj$|lm_head|fc_hidden|fc_embedding"

BASE = {
    "seed": 1,
    "text": {
        "model_type": "qwen4_exp_text",
        "vocab_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "eos_token_id": 250,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 640,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 60,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "mtp_num_hidden_layers": 1,
    },
    "rules": [],
    "table": {"bits": 5, "shards": 1, "side": True},
    "layout": "shards",  # two shards and an index, or "single"
    "quantization_config": True,
    "generation_config": True,
    "visual": False,  # adds an image tower's tensor, which no text tool may need
}

NO_INDEXER = dict.fromkeys(
    ["indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"]
)
NO_PLE = dict.fromkeys(
    ["ple_layer_ids", "ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base"]
)
WIDTHS = [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]

VARIANTS = {
    "codebooks": {
        "rules": [
            [r"shared_expert\.gate_proj", {"codebook": "mcg", "bits": 5}],
            [r"\.experts\.[13]\.", {"codebook": "3inst", "bits": 3}],
            [r"\.experts\.2\.", {"codebook": "mcg", "bits": 4, "marker": "empty"}],
            [r"^lm_head", {"codebook": "3inst", "bits": 6}],
            [r"^mtp.*self_attn", {"codebook": "mcg", "bits": 3}],
            [r"layers\.0\..*(attn|mlp)\..*(qkv|_proj)$", {"codebook": "3inst", "bits": 4}],
            [r"layers\.1\..*(attn|mlp)\..*(qkv|_proj)$", {"codebook": "mcg", "bits": 4}],
            [r"layers\.2\..*(attn|mlp)\..*_proj$", {"codebook": "mul1", "bits": 4, "marker": "empty"}],
        ]
    },
    "widths": {
        "text": {"num_experts": 11, "num_experts_per_tok": 5},
        "rules": [
            [r"\.experts\..*gate_proj", {"codebook": "mul1", "bits": WIDTHS}],
            [r"\.experts\..*up_proj", {"codebook": "mul1", "bits": WIDTHS[3:] + WIDTHS[:3]}],
            [r"\.experts\..*down_proj", {"codebook": "mul1", "bits": WIDTHS[::-1]}],
            [r"in_proj_qkv", {"codebook": "mul1", "bits": [1, 2.5]}],
            [r"[qkv]_proj", {"codebook": "3inst", "bits": [1, 8, 2]}],
            [r"o_proj", {"codebook": "mcg", "bits": [7, 1]}],
            [r"lm_head", {"codebook": "mul1", "bits": 8}],
        ],
    },
    "plain": {
        "text": {
            "vocab_size": 200,
            "eos_token_id": 190,
            "hc_count": 3,
            "num_experts": 3,
            "heads_per_ngram": 1,
            "ple_embed_dim": 320,
        },
        "rules": [
            [r"in_proj_z|experts\.1\.down_proj|q_proj|shared_expert\.gate_proj", {"plain": "BF16", "bias": True}],
            [r"in_proj_a|o_proj|experts\.[0-2]\.up_proj", {"plain": "F32", "bias": True}],
            [r"out_proj|expert.*up_proj|norm|gate$|A_log|dt_bias|input_mix_weight_up", {"plain": "F32"}],
            [r"in_proj|index_qk|experts\.[02]|embed_tokens|fc_hidden|key_proj", {"plain": "F16"}],
            [r"", {"plain": "BF16"}],
        ],
        "quantization_config": False,
    },
    "packed-signs": {"rules": [[QUANTIZED, {"codebook": "3inst", "bits": 4, "signs": "packed"}]]},
    "streams-2": {"text": {"hc_count": 2}},
    "streams-5": {"text": {"hc_count": 5, "hc_lowrank": 24}, "table": {"bits": 8}},
    "gdn-dims": {
        "text": {
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 96,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
        },
        "rules": [[r"in_proj_qkv|in_proj_z", {"plain": "BF16"}], [r"linear_attn.out_proj", {"plain": "F16"}]],
    },
    "attn-dims": {
        "text": {
            "layer_types": ["linear_attention", "linear_attention", "qwen_sparse_attention"],
            "rms_norm_eps": 1e-5,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "indexer_head_dim": 64,
            "indexer_n_heads": 2,
            "indexer_compress_ratio": 8,
            "indexer_budget": 32,
        },
        "rules": [[r"\.[kv]_proj|index_qk_proj", {"plain": "F16"}]],
    },
    "ngram-2": {
        "text": {
            "ngram_size": 2,
            "ple_embed_dim": 320,
            "ple_conv_kernel_size": 5,
            "seed": None,
            "eos_token_id": [250, 251],
            "make_ngram_vocab_size_divisible_by": 64,
        },
        "table": {"bits": 6, "side": False},
    },
    "ngram-4": {
        "text": {
            "hc_count": 2,
            "ngram_size": 4,
            "heads_per_ngram": 3,
            "ple_embed_dim": 1440,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "ple_layer_ids": [4, 1],
            "ple_conv_kernel_size": 2,
            "ngram_vocab_size_base": 30,
            "seed": 77,
            "num_experts": 2,
            "split_ngram_parts": 12,
            "mtp_num_hidden_layers": None,
        },
        "table": {"bits": 4, "shards": 12},
    },
    "ngram-plain": {"text": {"hidden_size": 256, "hc_count": 2, "ple_embed_dim": None}, "table": {"plain": "F16"}},
    "silu-gate": {"text": {"output_gate_type": "silu"}},
    "silu-gate-absent": {"text": {"output_gate_type": None}},
    "topk-raw": {"text": {"norm_topk_prob": False, "num_experts": 6, "num_experts_per_tok": 3}},
    "no-ple": {"text": NO_PLE},
    "no-mtp": {"text": {"mtp_num_hidden_layers": None}},
    "tied": {"text": {"tie_word_embeddings": True, "vocab_size": 300}},
    "interval": {
        "text": {
            "layer_types": None,
            "full_attention_interval": 2,
            "num_hidden_layers": 4,
            "ple_layer_ids": [3],
            "indexer_compress_ratio": 3,
            "indexer_budget": 21,
        }
    },
    "all-linear": {
        "text": {**NO_INDEXER, "layer_types": ["linear_attention"] * 3, "mtp_num_hidden_layers": 0},
    },
    "bias": {"rules": [[QUANTIZED, {"codebook": "mul1", "bits": [3, 4], "bias": True}]]},
    "top-1": {"text": {"num_experts": 3, "num_experts_per_tok": 1}},
    "expert-dims": {
        "text": {
            "hidden_size": 256,
            "hc_count": 2,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 256,
            "num_experts": 3,
            "heads_per_ngram": 1,
            "ple_embed_dim": 320,
        },
        "rules": [[r"expert.*_proj", {"codebook": "mul1", "bits": [2, 3]}]],
    },
    "single-file": {"layout": "single", "table": {"side": False}, "generation_config": False, "visual": True},
}


def resolve(spec):
    """spec over BASE, with null keys of text_config removed."""
    full = copy.deepcopy(BASE)
    for key, value in spec.items():
        if isinstance(full[key], dict):
            full[key].update(value)
        else:
            full[key] = value
    full["text"] = {key: value for key, value in full["text"].items() if value is not None}
    return full


if __name__ == "__main__":
    print("\n".join(VARIANTS))
