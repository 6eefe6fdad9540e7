"""The qwen4_exp text model in numpy float64 over exactly decoded weights: a whole prompt at once, no states.

An independent reading of the model's definition, written for the tests to check the engine against.
"""

import json
from pathlib import Path

import numpy as np

import ngram
from exl3 import Exl3Linear, PlainLinear, decode_ngram_rows
from safetensors_file import read_folder

TRUNK = "model.language_model"


class Config:
    """text_config of a config.json with the defaults filled in; attributes carry the file's own key names."""

    DEFAULTS = {
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "linear_conv_kernel_dim": 4, "norm_topk_prob": True,
        "hidden_act": "silu", "output_gate_type": None, "ple_layer_ids": None, "ple_embed_dim": None,
        "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128, "seed": 1234, "full_attention_interval": 4, "layer_types": None,
        "mtp_num_hidden_layers": 0, "eos_token_id": None,
    }  # fmt: skip

    def __init__(self, root):
        text = root["text_config"]
        self.__dict__.update(self.DEFAULTS)
        self.__dict__.update(text)
        self.tie_word_embeddings = text.get("tie_word_embeddings", root.get("tie_word_embeddings", False))
        self.ple_layer_ids = sorted(set(self.ple_layer_ids or []))
        self.ple_embed_dim = self.ple_embed_dim or self.hidden_size
        self.output_gate_type = self.output_gate_type or self.hidden_act
        interval = self.full_attention_interval
        types = self.layer_types or ["linear_attention" if (i + 1) % interval else "full_attention"
                                     for i in range(self.num_hidden_layers)]  # fmt: skip
        self.linear_layers = [kind == "linear_attention" for kind in types]
        rope = text.get("rope_parameters") or {}
        self.rope_theta = rope.get("rope_theta", 10000.0)
        self.rotary_dim = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        eos = self.eos_token_id
        self.ngram_eos = eos[0] if isinstance(eos, list) else eos
        self.ngram_heads = (self.ngram_size - 1) * self.heads_per_ngram

    @classmethod
    def load(cls, folder):
        return cls(json.loads((Path(folder) / "config.json").read_text()))


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0.0, x)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def causal_conv(x, weight, dilation=1):
    """x [rows, channels], weight [channels, taps]; the last tap meets the current row."""
    taps = weight.shape[1]
    reach = (taps - 1) * dilation
    padded = np.concatenate([np.zeros((reach, x.shape[1])), x])
    return sum(padded[tap * dilation : tap * dilation + len(x)] * weight[:, tap] for tap in range(taps))


class Rows:
    """What one forward pass computes, and how close its discrete choices were."""

    def __init__(self):
        self.hidden = []  # [rows, n, H] entering each layer
        self.stack = None  # [rows, n, H] before the final mixer
        self.mixed = None  # [rows, H] after it
        self.logits = None  # [rows, vocab]
        self.mtp_logits = None  # [rows - 1, vocab]; row i proposes token i + 2
        self.router_margin = np.inf  # least distance, in logits, between the last expert taken and the first left
        self.index_margin = np.inf  # the same of index scores; 0 scores count as their largest dot product
        self.selective_rows = 0  # rows of sparse layers that left out a complete block


class Model:
    def __init__(self, folder):
        self.folder = folder
        self.config = Config.load(folder)
        self.tensors = read_folder(folder)
        self.linears = {}
        self.norms = {}
        self.tables = {}
        self.has_mtp = "mtp.hyper_connection_mixer.hc_norm.weight" in self.tensors

    def value(self, name):
        if name not in self.norms:
            self.norms[name] = self.tensors[name].values()
        return self.norms[name]

    def linear(self, prefix, x):
        if prefix not in self.linears:
            kind = Exl3Linear if f"{prefix}.trellis" in self.tensors else PlainLinear
            self.linears[prefix] = kind(self.tensors, prefix)
        return self.linears[prefix](x)

    def rms(self, x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)

    def norm(self, x, name):
        return self.rms(x) * (1.0 + self.value(f"{name}.weight"))

    def grouped_norm(self, x, name):
        """x [rows, n, H], each stream by itself."""
        return self.rms(x) * (1.0 + self.value(f"{name}.weight").reshape(x.shape[1:]))

    def rope(self, x, positions):
        """x [rows, ..., dim], positions [rows]; angles are rounded to fp32 as every implementation does."""
        half = self.config.rotary_dim // 2
        exponent = -np.arange(half) / half
        frequency = (float(self.config.rope_theta) ** exponent).astype(np.float32)
        angle = (np.asarray(positions, np.float32)[:, None] * frequency).astype(np.float64)
        shape = (len(x),) + (1,) * (x.ndim - 2) + (half,)
        cos, sin = np.cos(angle).reshape(shape), np.sin(angle).reshape(shape)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def hyper_connection(self, prefix, x):
        rows, n, _ = x.shape
        normed = self.grouped_norm(x, f"{prefix}.hc_norm")
        flat = normed.reshape(rows, -1)
        mix = self.linear(f"{prefix}.input_mix_weight_down", flat) / n
        mix = sigmoid(self.linear(f"{prefix}.input_mix_weight_up", silu(mix)))
        u = (mix.reshape(x.shape) * normed).mean(axis=1)
        inject = f"{prefix}.block_inject_weight"
        return u, 2.0 * sigmoid(self.linear(inject, flat) / n) if f"{inject}.weight" in self.tensors else None

    def gdn(self, prefix, u):
        c = self.config
        rows = len(u)
        key_heads, value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        key_dim, value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        key_width = key_heads * key_dim
        qkv = self.linear(f"{prefix}.in_proj_qkv", u)
        qkv = silu(causal_conv(qkv, self.value(f"{prefix}.conv1d.weight")[:, 0]))
        q, k, v = np.split(qkv, [key_width, 2 * key_width], axis=1)
        unit = lambda x: x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        repeat = value_heads // key_heads
        q = unit(q.reshape(rows, key_heads, key_dim)).repeat(repeat, axis=1) / np.sqrt(key_dim)
        k = unit(k.reshape(rows, key_heads, key_dim)).repeat(repeat, axis=1)
        v = v.reshape(rows, value_heads, value_dim)
        beta = sigmoid(self.linear(f"{prefix}.in_proj_b", u))
        step = softplus(self.linear(f"{prefix}.in_proj_a", u) + self.value(f"{prefix}.dt_bias"))
        decay = np.exp(-np.exp(self.value(f"{prefix}.A_log")) * step)
        state = np.zeros((value_heads, key_dim, value_dim))
        out = np.empty((rows, value_heads, value_dim))
        for t in range(rows):
            state *= decay[t][:, None, None]
            memory = np.matmul(k[t][:, None, :], state)[:, 0]
            state += k[t][:, :, None] * ((v[t] - memory) * beta[t][:, None])[:, None, :]
            out[t] = np.matmul(q[t][:, None, :], state)[:, 0]
        z = self.linear(f"{prefix}.in_proj_z", u).reshape(out.shape)
        gate = {"sigmoid": sigmoid, "silu": silu}[c.output_gate_type](z)
        out = self.value(f"{prefix}.norm.weight") * self.rms(out) * gate
        return self.linear(f"{prefix}.out_proj", out.reshape(rows, -1))

    def visible_tokens(self, prefix, u, result):
        """Which tokens each row attends to: bool [rows, rows]."""
        c = self.config
        rows, heads, dim, ratio = len(u), c.indexer_n_heads, c.indexer_head_dim, c.indexer_compress_ratio
        index = self.linear(f"{prefix}.index_qk_proj", u).reshape(rows, heads + 1, dim)
        query = self.rope(self.norm(index[:, :heads], f"{prefix}.q_layernorm"), np.arange(rows))
        blocks = rows // ratio
        pooled = index[: blocks * ratio, heads].reshape(blocks, ratio, dim).mean(axis=1)
        pooled = self.rope(self.norm(pooled, f"{prefix}.k_layernorm"), np.arange(blocks) * ratio)
        dots = np.einsum("thd,bd->tbh", query, pooled)
        scores = np.maximum(dots, 0).sum(axis=2) / np.sqrt(dim)
        visible = np.tril(np.ones((rows, rows), bool))
        limit = c.indexer_budget // ratio
        for t in range(rows):
            complete = (t + 1) // ratio
            if complete <= limit:
                continue
            result.selective_rows += 1
            order = np.argsort(-scores[t, :complete], kind="stable")
            for block in order[limit:]:
                visible[t, block * ratio : (block + 1) * ratio] = False
            # Scores of 0 tie by definition; what could break such a tie is a dot product that rounds across 0.
            strength = np.where(scores[t] > 0, scores[t], dots[t].max(axis=1))[:complete]
            taken, left = strength[order[:limit]].min(), strength[order[limit:]].max()
            margin = taken - max(left, 0) if taken > 0 else np.abs(strength).min()
            result.index_margin = min(result.index_margin, margin)
        return visible

    def attention(self, prefix, u, result):
        c = self.config
        rows, dim = len(u), c.head_dim
        query, gate = np.split(self.linear(f"{prefix}.q_proj", u).reshape(rows, -1, 2 * dim), 2, axis=2)
        key = self.linear(f"{prefix}.k_proj", u).reshape(rows, -1, dim)
        value = self.linear(f"{prefix}.v_proj", u).reshape(rows, -1, dim)
        query = self.rope(self.norm(query, f"{prefix}.q_norm"), np.arange(rows))
        key = self.rope(self.norm(key, f"{prefix}.k_norm"), np.arange(rows))
        visible = self.visible_tokens(f"{prefix}.indexer", u, result)
        group = c.num_attention_heads // c.num_key_value_heads
        out = np.empty(query.shape)
        for h in range(c.num_attention_heads):
            scores = query[:, h] @ key[:, h // group].T * dim**-0.5
            out[:, h] = softmax(np.where(visible, scores, -np.inf)) @ value[:, h // group]
        return self.linear(f"{prefix}.o_proj", (out * sigmoid(gate)).reshape(rows, -1))

    def ngram_embedding(self, prefix, ple_index, tokens):
        c = self.config
        dim = c.ple_embed_dim // c.ngram_heads
        if prefix not in self.tables:
            self.tables[prefix] = self.load_table(prefix)
        table = self.tables[prefix]
        indices = ngram.row_indices(c, ple_index, tokens)
        rows = table.raw[indices.reshape(-1)]
        if table.dtype == "I16":
            values = decode_ngram_rows(rows, dim).reshape(len(tokens), -1, dim) + self.value(f"{prefix}.head_bias")
        else:
            values = type(table)(table.dtype, rows).values()
        return values.reshape(len(tokens), -1)

    def load_table(self, prefix):
        for name in (f"{prefix}.trellis", f"{prefix}.weight"):
            if name in self.tensors:
                return self.tensors[name]
        shards = []
        while f"{prefix}.shard_{len(shards)}.trellis" in self.tensors:
            shards.append(self.tensors[f"{prefix}.shard_{len(shards)}.trellis"])
        return type(shards[0])(shards[0].dtype, np.concatenate([shard.raw for shard in shards]))

    def ple(self, prefix, ple_index, x, tokens):
        c = self.config
        rows = len(x)
        e = self.ngram_embedding(f"{prefix}.ple_embedding.ngram_embedding", ple_index, tokens)
        key = self.grouped_norm(self.linear(f"{prefix}.key_proj", e).reshape(x.shape), f"{prefix}.norm_key")
        query = self.grouped_norm(x, f"{prefix}.norm_query")
        gate = (key * query).sum(axis=2) / np.sqrt(c.hidden_size)
        gate = np.sign(gate) * np.sqrt(np.maximum(np.abs(gate), 1e-6))
        w = sigmoid(gate)[:, :, None] * self.linear(f"{prefix}.value_proj", e)[:, None, :]
        conv_in = self.grouped_norm(w, f"{prefix}.norm_conv").reshape(rows, -1)
        conv = causal_conv(conv_in, self.value(f"{prefix}.conv1d.weight")[:, 0], c.ngram_size)
        return w + silu(conv).reshape(x.shape)

    def swiglu(self, prefix, u):
        gate = silu(self.linear(f"{prefix}.gate_proj", u))
        return self.linear(f"{prefix}.down_proj", gate * self.linear(f"{prefix}.up_proj", u))

    def moe(self, prefix, u, result):
        c = self.config
        top_k = c.num_experts_per_tok
        logits = self.linear(f"{prefix}.gate", u)
        order = np.argsort(-logits, axis=1, kind="stable")
        if top_k < c.num_experts:
            ranked = np.take_along_axis(logits, order, axis=1)
            result.router_margin = min(result.router_margin, (ranked[:, top_k - 1] - ranked[:, top_k]).min())
        chosen = order[:, :top_k]
        weights = np.take_along_axis(softmax(logits), chosen, axis=1)
        if c.norm_topk_prob:
            weights = weights / weights.sum(axis=1, keepdims=True)
        y = sigmoid(self.linear(f"{prefix}.shared_expert_gate", u)) * self.swiglu(f"{prefix}.shared_expert", u)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            y[rows] += weights[rows, slots][:, None] * self.swiglu(f"{prefix}.experts.{expert}", u[rows])
        return y

    def layer(self, prefix, x, linear, result):
        u, inject = self.hyper_connection(f"{prefix}.attn_hyper_connection", x)
        y = self.gdn(f"{prefix}.linear_attn", u) if linear else self.attention(f"{prefix}.self_attn", u, result)
        x = x + inject[:, :, None] * y[:, None, :]
        u, inject = self.hyper_connection(f"{prefix}.mlp_hyper_connection", x)
        return x + inject[:, :, None] * self.moe(f"{prefix}.mlp", u, result)[:, None, :]

    def head(self, h):
        if self.config.tie_word_embeddings:
            return h @ self.value(f"{TRUNK}.embed_tokens.weight").T
        return self.linear("lm_head", h)

    def draft(self, stack, next_tokens, result):
        """Row i: the stack at position i and the token at i + 1."""
        hidden = self.linear("mtp.fc_hidden", self.grouped_norm(stack, "mtp.pre_fc_norm_hidden"))
        embedding = self.value(f"{TRUNK}.embed_tokens.weight")[next_tokens]
        x = hidden + self.linear("mtp.fc_embedding", self.norm(embedding, "mtp.pre_fc_norm_embedding"))[:, None, :]
        x = self.layer("mtp.layers.0", x, False, result)
        return self.head(self.hyper_connection("mtp.hyper_connection_mixer", x)[0])

    def forward(self, tokens):
        c = self.config
        tokens = [int(token) for token in tokens]
        result = Rows()
        embedding = self.value(f"{TRUNK}.embed_tokens.weight")[tokens]
        x = np.repeat(embedding[:, None, :], c.hc_count, axis=1)
        for i, linear in enumerate(c.linear_layers):
            result.hidden.append(x)
            prefix = f"{TRUNK}.layers.{i}"
            if i + 1 in c.ple_layer_ids:
                x = x + self.ple(f"{prefix}.ple", c.ple_layer_ids.index(i + 1), x, tokens)
            x = self.layer(prefix, x, linear, result)
        result.stack = x
        result.mixed = self.hyper_connection(f"{TRUNK}.hyper_connection_mixer", x)[0]
        result.logits = self.head(result.mixed)
        if self.has_mtp and len(tokens) > 1:
            result.mtp_logits = self.draft(x[:-1], tokens[1:], result)
        return result
