"""Time of an op on a device: arithmetic and traffic that overlap in part, and what a launch costs.

    arithmetic = (flops + idle rows * flops of a row) * waves(tiles) / achieved flops per second of its kind and dtype
    traffic    = weight and activation bytes / achieved bandwidth + KV bytes / achieved bandwidth of attention
    seconds    = (arithmetic^p + traffic^p)^(1/p) + launches * launch_s

The p-norm lies between the roofline's maximum (p = infinity) and no overlap at all (p = 1). `waves` is the last wave of
tiles that leaves compute units idle (NVIDIA, "Matrix multiplication background", wave quantisation): one where the
tiles do not fill the device once, since kernels then split the inner dimension. A product of few rows leaves part of
each matrix unit idle: it costs as if it had some rows more.

Everything is written for arrays, so that the fit and the planner run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.cost_models.profile import OpFacts, UnitFacts
from plait.cost_models.tables import Floats
from plait.ir.facts import Step

#: Rows and columns of an output that one compute unit holds at a time.
TILE = 128

#: What ops are timed by. `other` moves activations.
MATMUL, EXPERTS, ATTENTION, OTHER = KINDS = ("matmul", "experts", "attention", "other")

_KIND_OF = {
    "plait.linear": MATMUL,
    "plait.linears": MATMUL,
    "plait.logits": MATMUL,
    "plait.latent_linear": MATMUL,
    "plait.experts": EXPERTS,
    "plait.attention": ATTENTION,
    "plait.latent_attention": ATTENTION,
}

#: Ops between a matrix that is split by columns and one that is split by rows: each device has its part of the width.
_SPLIT = frozenset({"plait.rope", "plait.silu_mul", "plait.gelu_mul", "plait.gelu", "plait.clamped_swiglu"})

#: Kernels of an op: attention writes its KV first; moving activations is fused with what stands around it. Experts are
#: sorted, multiplied twice and summed, and have a cost of their own.
LAUNCHES = {MATMUL: 1.0, EXPERTS: 0.0, ATTENTION: 2.0, OTHER: 0.0}

#: And where a product's input is rounded to a narrow dtype first.
ROUNDING_LAUNCHES = 0.5


def kind_of(name: str) -> str:
    return _KIND_OF.get(name, OTHER)


@dataclass(frozen=True)
class Work:
    """Ops as arrays, one entry per distinct op: what each does in a step, and how often it stands in the model.

    Attributes:
        kind: index in KINDS.
        wide: it multiplies in the model's dtype although the weights of blocks are stored in a narrower one.
        row_flops: of one row more of a product (of each expert that is met).
        tiles: of its output; 0 where tiling says nothing.
    """

    kind: Any
    wide: Any
    flops: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    kv_bytes: Floats
    row_flops: Floats
    tiles: Floats
    count: Floats

    @staticmethod
    def of(rows: Iterable[tuple[float, ...]]) -> Work:
        table = np.array(list(rows), dtype=np.float64).reshape(-1, len(fields(Work)))
        return Work(table[:, 0].astype(int), table[:, 1].astype(bool), *table[:, 2:].T)


@dataclass(frozen=True)
class Shard:
    """How a block's ops are split over the devices of one slice (tensor parallelism), and how its numbers are stored.

    Attributes:
        devices: that split every matrix.
        weight_ratio: bytes of a block's weights, to those of the model's dtype; of dense ones and of experts.
        kv_ratio: bytes of KV, to those of the model's dtype.
    """

    devices: int = 1
    weight_ratio: float = 1.0
    expert_ratio: float = 1.0
    kv_ratio: float = 1.0


def op_row(op: OpFacts, step: Step, shard: Shard, kv_heads: int, count: float = 1.0) -> tuple[float, ...]:
    """One op as a row of `Work`, on one of the shard's devices.

    Args:
        kv_heads: of the attentions of its unit; no more devices than heads share its KV.
    """
    cost, kind, matrix = op.cost(step), kind_of(op.name), op.matrix
    split = shard.devices if kind != OTHER or op.name in _SPLIT else 1
    wide = op.name == "plait.logits" or (kind == MATMUL and shard.weight_ratio == 1.0)
    ratio = {MATMUL: shard.weight_ratio, EXPERTS: shard.expert_ratio}.get(kind, 1.0)
    if op.name == "plait.logits":
        ratio = 1.0
    tiles = row_flops = 0.0
    if matrix is not None:
        rows = float(step.logit_rows if op.name == "plait.logits" else step.tokens) * matrix.chosen
        met = matrix.experts * (1 - (1 - matrix.chosen / matrix.experts) ** step.tokens) if matrix.experts > 1 else 1.0
        if rows:
            row_flops = cost.flops / rows * met / split
            tiles = met * math.ceil(rows / met / TILE) * math.ceil(matrix.columns / split / TILE)
    return (
        KINDS.index(kind),
        wide,
        cost.flops / split,
        cost.weight_bytes * ratio / split,
        cost.activation_bytes / split,
        cost.kv_bytes * shard.kv_ratio / min(split, max(kv_heads, 1)),
        row_flops,
        tiles,
        count,
    )


def unit_rows(facts: UnitFacts, step: Step, shard: Shard = Shard(), count: float = 1.0) -> list[tuple[float, ...]]:
    heads = min((kv.kv_heads for kv in facts.kv), default=1)
    return [op_row(op, step, shard, heads, count) for op in facts.ops]


@dataclass(frozen=True)
class Speeds:
    """What a device reaches: scalars, or arrays with one entry per op of the `Work` they are used on.

    Attributes:
        flops_per_s: of each op, by its kind and dtype.
        idle_rows: that a product costs more than it has.
        bytes_per_s, kv_bytes_per_s: of weights and activations, and of KV in an attention.
        launch_s: of one kernel; expert_launch_s: of all kernels that sort tokens by expert and sum what they give.
        units: compute units that take a tile each; 0 where they are not known.
        overlap: p of the norm.
    """

    flops_per_s: Any
    idle_rows: Any
    bytes_per_s: Any
    kv_bytes_per_s: Any
    launch_s: Any
    expert_launch_s: Any
    units: Any
    overlap: Any


_LAUNCHES = np.array([LAUNCHES[kind] for kind in KINDS])


def wave_factor(tiles: Any, units: Any) -> Floats:
    """How much longer whole waves take than their tiles: 1 below one wave or where units are unknown."""
    waves = np.asarray(tiles, dtype=float) / np.maximum(units, 1.0)
    return np.where((waves > 1.0) & (np.asarray(units) > 0), np.ceil(waves) / np.maximum(waves, 1e-9), 1.0)


def arithmetic_s(work: Work, at: Speeds) -> Floats:
    flops = work.flops + at.idle_rows * work.row_flops
    return np.asarray(flops * wave_factor(work.tiles, at.units) / at.flops_per_s)


def traffic_s(work: Work, at: Speeds) -> Floats:
    return np.asarray((work.weight_bytes + work.activation_bytes) / at.bytes_per_s + work.kv_bytes / at.kv_bytes_per_s)


def smooth_max(a: Any, b: Any, p: Any) -> Floats:
    """(a^p + b^p)^(1/p), scaled by the larger so that small seconds do not underflow."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return np.asarray(top * ((a / top) ** p + (b / top) ** p) ** (1 / np.asarray(p, dtype=float)))


def seconds(work: Work, at: Speeds) -> Floats:
    """Of each op, once."""
    both = smooth_max(arithmetic_s(work, at), traffic_s(work, at), at.overlap)
    rounds = (work.kind == KINDS.index(MATMUL)) & ~work.wide
    kernels = (_LAUNCHES[work.kind] + ROUNDING_LAUNCHES * rounds) * at.launch_s
    return np.asarray(both + np.where(work.kind == KINDS.index(EXPERTS), at.expert_launch_s, kernels))
