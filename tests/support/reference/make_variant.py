#!/usr/bin/env python3
"""Writes a small random qwen4_exp checkpoint, and beside it what the numpy reference computes from it.

Usage: make_variant.py OUTDIR --variant NAME | --spec FILE.json ;  make_variant.py --list

OUTDIR/checkpoint is the checkpoint folder. OUTDIR/reference.safetensors holds, for prompt I: tokens.I, logits.I of
every row, hidden.I.L (the stream stack entering layer L), stack.I (the one before the final mixer) and mtp_logits.I
(row i proposes token i + 2).
"""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

import ngram
from exl3 import MCG, MUL1, codebook_table, pack_signs
from model import TRUNK, Config, Model
from safetensors_file import Tensor, write_file
from variants import QUANTIZED, VARIANTS, resolve

PROMPT_LENGTHS = (1, 5, 40, 150)
# Nearer choices of experts or blocks than this could fall differently in fp32.
LEAST_MARGIN = 1e-5


class Builder:
    """Random tensors with names, dtypes and scales as a trained checkpoint has them."""

    def __init__(self, spec, seed):
        self.spec = spec
        self.root = self.config_json(spec)
        self.config = Config(self.root)
        self.rng = np.random.default_rng(seed)
        self.tensors = {}
        self.table_tensors = {}
        self.dealt = {}

    @staticmethod
    def config_json(spec):
        root = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
        root["text_config"] = spec["text"]
        root["tie_word_embeddings"] = spec["text"]["tie_word_embeddings"]
        if spec["quantization_config"]:
            root["quantization_config"] = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}
        return root

    def form(self, prefix, default):
        for pattern, form in self.spec["rules"]:
            if re.search(pattern, prefix):
                return form, pattern
        return default, ""

    def vector(self, name, shape, mean=0.0, spread=0.1, dtype="F16"):
        form, _ = self.form(name, {"plain": dtype})
        values = mean + spread * self.rng.standard_normal(shape)
        self.tensors[name] = Tensor.make(form.get("plain", dtype), values)

    def signed(self, size, scale):
        return self.rng.uniform(0.7, 1.3, size) * self.rng.choice([-1.0, 1.0], size) * scale

    def linear(self, prefix, inputs, outputs, gain=1.0):
        """A layer that turns inputs of rms 1 into outputs of rms `gain`, save where its scales are bare signs."""
        quantized = re.search(QUANTIZED, prefix) and ".ple." not in prefix
        default = {"codebook": "mul1", "bits": 4} if quantized else {"plain": "F16"}
        form, pattern = self.form(prefix, default)
        if form.get("bias"):
            dtype = form.get("plain", "F16")
            self.tensors[f"{prefix}.bias"] = Tensor.make(dtype, 0.3 * self.rng.standard_normal(outputs))
        if "plain" in form:
            weight = self.rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)
            self.tensors[f"{prefix}.weight"] = Tensor.make(form["plain"], weight)
            return
        if inputs % 128 or outputs % 128:
            raise ValueError(f"{prefix} is [{outputs}, {inputs}]: not whole blocks of 128, so it cannot be quantized")
        bits, codebook = form["bits"], form["codebook"]
        if isinstance(bits, list):
            turn = self.dealt.setdefault(pattern, 0)
            self.dealt[pattern] += 1
            bits = bits[turn % len(bits)]
        self.tensors[f"{prefix}.trellis"] = self.words((inputs // 16, outputs // 16, int(16 * bits)))
        if form.get("signs") == "packed":
            self.tensors[f"{prefix}.su"] = Tensor.make("I16", pack_signs(self.signed(inputs, 1.0)))
            self.tensors[f"{prefix}.sv"] = Tensor.make("I16", pack_signs(self.signed(outputs, 1.0)))
        else:
            deviation = codebook_table(codebook).astype(np.float64).std()
            self.tensors[f"{prefix}.suh"] = Tensor.make("F16", self.signed(inputs, 1.0))
            scale = gain / (deviation * np.sqrt(inputs))
            self.tensors[f"{prefix}.svh"] = Tensor.make("F16", self.signed(outputs, scale))
        if codebook != "3inst":
            marker = np.array(MUL1 if codebook == "mul1" else MCG, np.uint32).view(np.int32)
            marker = marker.reshape(-1)[:0] if form.get("marker") == "empty" else marker
            self.tensors[f"{prefix}.{codebook}"] = Tensor.make("I32", marker)

    def words(self, shape):
        return Tensor("I16", self.rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int16))

    def hyper_connection(self, prefix, inject=True):
        c = self.config
        n, width = c.hc_count, c.hc_count * c.hidden_size
        self.vector(f"{prefix}.hc_norm.weight", width)
        self.linear(f"{prefix}.input_mix_weight_down", width, c.hc_lowrank, 1.5 * n)
        self.linear(f"{prefix}.input_mix_weight_up", c.hc_lowrank, width, 2.0)
        if inject:
            self.linear(f"{prefix}.block_inject_weight", width, n, float(n))

    def gdn(self, prefix):
        c = self.config
        heads, hidden = c.linear_num_value_heads, c.hidden_size
        values = heads * c.linear_value_head_dim
        channels = 2 * c.linear_num_key_heads * c.linear_key_head_dim + values
        self.linear(f"{prefix}.in_proj_qkv", hidden, channels)
        self.linear(f"{prefix}.in_proj_z", hidden, values)
        self.linear(f"{prefix}.in_proj_a", hidden, heads)
        self.linear(f"{prefix}.in_proj_b", hidden, heads)
        self.linear(f"{prefix}.out_proj", values, hidden)
        self.vector(f"{prefix}.conv1d.weight", (channels, 1, c.linear_conv_kernel_dim), spread=0.5, dtype="BF16")
        self.vector(f"{prefix}.A_log", heads, mean=0.3, spread=0.6, dtype="BF16")
        self.vector(f"{prefix}.dt_bias", heads, mean=-2.0, spread=1.0, dtype="BF16")
        self.vector(f"{prefix}.norm.weight", c.linear_value_head_dim, mean=1.0, dtype="BF16")

    def attention(self, prefix):
        c = self.config
        heads, keys, dim, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        self.linear(f"{prefix}.q_proj", hidden, heads * 2 * dim)
        self.linear(f"{prefix}.k_proj", hidden, keys * dim)
        self.linear(f"{prefix}.v_proj", hidden, keys * dim)
        self.linear(f"{prefix}.o_proj", heads * dim, hidden)
        self.vector(f"{prefix}.q_norm.weight", dim, mean=0.2, dtype="BF16")
        self.vector(f"{prefix}.k_norm.weight", dim, mean=0.2, dtype="BF16")
        index_dim = c.indexer_head_dim
        self.linear(f"{prefix}.indexer.index_qk_proj", hidden, (c.indexer_n_heads + 1) * index_dim)
        self.vector(f"{prefix}.indexer.q_layernorm.weight", index_dim, dtype="BF16")
        self.vector(f"{prefix}.indexer.k_layernorm.weight", index_dim, dtype="BF16")

    def feed_forward(self, prefix, width):
        self.linear(f"{prefix}.gate_proj", self.config.hidden_size, width, 1.5)
        self.linear(f"{prefix}.up_proj", self.config.hidden_size, width)
        self.linear(f"{prefix}.down_proj", width, self.config.hidden_size)

    def layer(self, prefix, linear):
        c = self.config
        self.hyper_connection(f"{prefix}.attn_hyper_connection")
        self.hyper_connection(f"{prefix}.mlp_hyper_connection")
        if linear:
            self.gdn(f"{prefix}.linear_attn")
        else:
            self.attention(f"{prefix}.self_attn")
        self.linear(f"{prefix}.mlp.gate", c.hidden_size, c.num_experts, 2.0)
        self.linear(f"{prefix}.mlp.shared_expert_gate", c.hidden_size, 1)
        self.feed_forward(f"{prefix}.mlp.shared_expert", c.shared_expert_intermediate_size)
        for expert in range(c.num_experts):
            self.feed_forward(f"{prefix}.mlp.experts.{expert}", c.moe_intermediate_size)

    def ple(self, prefix, ple_index):
        c = self.config
        width = c.hc_count * c.hidden_size
        self.linear(f"{prefix}.key_proj", c.ple_embed_dim, width)
        self.linear(f"{prefix}.value_proj", c.ple_embed_dim, c.hidden_size)
        for name in ("norm_key", "norm_query", "norm_conv"):
            self.vector(f"{prefix}.{name}.weight", width)
        self.vector(f"{prefix}.conv1d.weight", (width, 1, c.ple_conv_kernel_size), spread=0.5)
        self.table(f"{prefix}.ple_embedding.ngram_embedding", ple_index)

    def table(self, prefix, ple_index):
        c, form = self.config, self.spec["table"]
        sizes = ngram.head_sizes(c, ple_index)
        rows, dim = ngram.table_rows(c, sizes), c.ple_embed_dim // c.ngram_heads
        out = self.table_tensors
        if "plain" in form:
            out[f"{prefix}.weight"] = Tensor.make(form["plain"], self.rng.standard_normal((rows, dim)))
            return
        words = self.words((rows, 1 + dim * form["bits"] // 16)).raw
        words[:, 0] = self.signed(rows, 0.8).astype(np.float16).view(np.int16)
        if form["shards"] == 1:
            out[f"{prefix}.trellis"] = Tensor("I16", words)
        else:
            step = -(-rows // form["shards"])
            for i in range(form["shards"]):
                out[f"{prefix}.shard_{i}.trellis"] = Tensor("I16", words[i * step : (i + 1) * step])
        out[f"{prefix}.head_bias"] = Tensor.make("F16", 0.3 * self.rng.standard_normal((c.ngram_heads, dim)))
        out[f"{prefix}.head_offsets"] = Tensor.make("I64", ngram.head_offsets(sizes))
        out[f"{prefix}.head_vocab_sizes"] = Tensor.make("I64", sizes)
        out[f"{prefix}.layer_multipliers"] = Tensor.make("I64", ngram.multipliers(c, ple_index))

    def build(self):
        c = self.config
        hidden = c.hidden_size
        self.vector(f"{TRUNK}.embed_tokens.weight", (c.vocab_size, hidden), spread=0.5, dtype="BF16")
        for i, linear in enumerate(c.linear_layers):
            self.layer(f"{TRUNK}.layers.{i}", linear)
            if i + 1 in c.ple_layer_ids:
                self.ple(f"{TRUNK}.layers.{i}.ple", c.ple_layer_ids.index(i + 1))
        self.hyper_connection(f"{TRUNK}.hyper_connection_mixer", inject=False)
        if not c.tie_word_embeddings:
            self.linear("lm_head", hidden, c.vocab_size, 4.0)
        if c.mtp_num_hidden_layers:
            self.vector("mtp.pre_fc_norm_hidden.weight", c.hc_count * hidden)
            self.vector("mtp.pre_fc_norm_embedding.weight", hidden, dtype="BF16")
            self.linear("mtp.fc_hidden", hidden, hidden)
            self.linear("mtp.fc_embedding", hidden, hidden)
            self.layer("mtp.layers.0", False)
            self.hyper_connection("mtp.hyper_connection_mixer", inject=False)
        if self.spec["visual"]:
            self.tensors["model.visual.patch_embed.proj.weight"] = Tensor.make("BF16", np.zeros((8, 3, 2, 4, 4)))

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.root, indent=1))
        if self.spec["generation_config"]:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": self.config.ngram_eos}))
        tensors = dict(self.tensors)
        if self.table_tensors and self.spec["table"]["side"]:
            write_file(folder / "ngram_embedding.safetensors", self.table_tensors, {"format": "exl3_ngram_trellis"})
        else:
            tensors.update(self.table_tensors)
        if self.spec["layout"] == "single":
            write_file(folder / "model.safetensors", tensors, {"format": "pt"})
            return
        names = sorted(tensors)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        weight_map = {}
        for i, half in enumerate(halves):
            file = f"model-{i + 1:05}-of-{len(halves):05}.safetensors"
            write_file(folder / file, {name: tensors[name] for name in half}, {"format": "pt"})
            weight_map.update(dict.fromkeys(half, file))
        total = sum(tensor.raw.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def prompts(self):
        """Random ids of several lengths, with eos at the start, inside, twice in a row and at the end."""
        c, eos = self.config, self.config.ngram_eos
        result = [self.rng.integers(0, c.vocab_size, length).tolist() for length in PROMPT_LENGTHS]
        if eos is not None:
            for prompt, places in zip(result, ([], [2], [0, 7, 20, 21, 39], [10, 50, 52, 53, 100])):
                for place in places:
                    prompt[place] = eos
        return result


def write_variant(spec, folder, attempt=0):
    """Writes the checkpoint folder of a spec; -> its prompts. Another attempt draws other numbers."""
    spec = resolve(spec)
    builder = Builder(spec, [spec["seed"], attempt])
    builder.build()
    builder.write(Path(folder))
    return builder.prompts()


def margin(rows):
    return min(rows.router_margin, rows.index_margin)


def write_reference(path, prompts, results):
    tensors = {}
    for i, (prompt, rows) in enumerate(zip(prompts, results)):
        flat = lambda stack: Tensor.make("F32", stack.reshape(len(stack), -1))
        tensors[f"tokens.{i}"] = Tensor.make("I32", prompt)
        tensors[f"logits.{i}"] = flat(rows.logits)
        tensors[f"stack.{i}"] = flat(rows.stack)
        for layer, hidden in enumerate(rows.hidden):
            tensors[f"hidden.{i}.{layer}"] = flat(hidden)
        if rows.mtp_logits is not None:
            tensors[f"mtp_logits.{i}"] = flat(rows.mtp_logits)
    write_file(path, tensors)


def main():
    parser = argparse.ArgumentParser(description="Writes a small random checkpoint and its reference outputs.")
    parser.add_argument("outdir", nargs="?", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--spec", type=Path, metavar="FILE", help="JSON, merged as the named ones in variants.py")
    parser.add_argument("--list", action="store_true", help="print the names of the variants")
    options = parser.parse_args()
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    if not options.outdir or bool(options.variant) == bool(options.spec):
        parser.error("give OUTDIR and one of --variant and --spec")
    spec = VARIANTS[options.variant] if options.variant else json.loads(options.spec.read_text())
    for attempt in range(20):
        folder = options.outdir / "checkpoint"
        prompts = write_variant(spec, folder, attempt)
        model = Model(folder)
        results = [model.forward(prompt) for prompt in prompts]
        least = min(map(margin, results))
        if least >= LEAST_MARGIN:
            write_reference(options.outdir / "reference.safetensors", prompts, results)
            size = sum(file.stat().st_size for file in folder.iterdir())
            peak = max(np.abs(rows.logits).max() for rows in results)
            print(f"{size} bytes, largest logit {peak:.2f}, least margin {least:.1e}, attempt {attempt}, "
                  f"{sum(rows.selective_rows for rows in results)} selective rows")  # fmt: skip
            return 0
    print("no attempt kept experts and blocks clear of ties", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
