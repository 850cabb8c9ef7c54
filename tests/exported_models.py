"""Decoders that torch exports: transformers' classes and one written by hand, with and without a KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.families import config_of, draw, model_class

LONGEST = 64


class Plain(nn.Module):
    """Token ids to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Cached(nn.Module):
    """Token ids, K and V of every layer, to logits of the last tokens and K and V with the new ones."""

    def __init__(self, model: nn.Module, keep: int = 0) -> None:
        super().__init__()
        self.model, self.keep = model, keep

    def forward(self, input_ids: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(past):
            cache.update(k, v, layer)
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=self.keep)
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def family(name: str, attention: str = "sdpa", **config: Any) -> nn.Module:
    """A tiny random model of transformers."""
    said = config_of(name, config)
    said._attn_implementation = attention
    model: nn.Module = model_class(name)(said).eval()
    draw(model, name, 3)
    return model


def export(module: nn.Module, tokens: int | None = None, most: int | None = LONGEST) -> ExportedProgram:
    """A program from token ids to logits, of `tokens` tokens or of up to `most`."""
    shapes = None if tokens else ({1: Dim("tokens", max=most) if most else Dim("tokens")},)
    ids = torch.zeros(1, tokens or 8, dtype=torch.long)
    return torch.export.export(module.eval(), (ids,), dynamic_shapes=shapes, strict=False)


def export_cached(model: Any, keep: int = 0) -> ExportedProgram:
    """A program with K and V of the past, (1, KV heads, past, head_dim), in and out."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = [(torch.zeros(1, heads, 5, dim), torch.zeros(1, heads, 5, dim)) for _ in range(config.num_hidden_layers)]
    new, old = Dim("tokens", max=LONGEST), Dim("past", max=LONGEST)
    shapes = ({1: new}, [({2: old}, {2: old})] * len(past))
    args = (torch.zeros(1, 8, dtype=torch.long), past)
    return torch.export.export(Cached(model, keep), args, dynamic_shapes=shapes, strict=False)


class Block(nn.Module):
    """A fused q, k and v, rope on a part of each head in another spelling, grouped heads, a gate by tanh-GELU."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * dim)
        self.out = nn.Linear(heads * dim, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.gate_up, self.down = nn.Linear(hidden, 96, bias=False), nn.Linear(48, hidden, bias=False)
        self.scale = 0.3

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, (heads, kv) = x.shape[1], (self.heads, self.kv_heads)
        q, k, v = self.qkv(self.norms[0](x)).split([heads * self.dim, kv * self.dim, kv * self.dim], dim=-1)
        q = self.turn(q.view(1, tokens, heads, self.dim), cos, sin).transpose(1, 2)
        k = self.turn(k.view(1, tokens, kv, self.dim), cos, sin).transpose(1, 2)
        v = v.view(1, tokens, kv, self.dim).transpose(1, 2)
        y = self.attend(q * 0.5, k, v).transpose(1, 2).flatten(2)
        x = x + self.scale * self.out(y)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.gelu(gate, approximate="tanh") * up)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = 2 * cos.shape[-1]
        x1, x2 = x[..., :part].chunk(2, dim=-1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
        return torch.cat((turned, x[..., part:]), dim=-1) if part < self.dim else turned

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Masked(Block):
    """Softmax by hand, each KV head repeated, a mask that is a buffer, a window, a soft-cap."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        places = torch.arange(LONGEST + 8)
        behind = places[None] > places[:, None]
        far = places[None] <= places[:, None] - 9
        self.register_buffer("hidden", behind | far, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens, groups = q.shape[2], self.heads // self.kv_heads
        k, v = (item.repeat_interleave(groups, dim=1) for item in (k, v))
        scores = 5.0 * torch.tanh(q @ k.mT / self.dim**0.5 / 5.0)
        scores = scores.masked_fill(self.hidden[:tokens, :tokens], float("-inf"))
        return scores.softmax(-1) @ v


class Written(nn.Module):
    """A decoder in nobody's style, with its rope tables as buffers."""

    def __init__(self, block: type[Block] = Block, rotary: int = 8, vocabulary: int = 61, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(block(hidden, 4, 2, 16) for _ in range(2))
        self.last = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        angles = torch.arange(LONGEST + 8)[:, None] * 500.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        cos, sin = (table[: tokens.shape[1], None] for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.last(x))
