"""The arrays that a program takes: their shapes, how they lie over a group's chips, and weights read into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from plait.backends.weights import read_stacked, read_weight
from plait.backends.xla.buckets import Shape
from plait.backends.xla.program import Pool, Program, Weight
from plait.backends.xla.split import AXIS, Split
from plait.ir.numbers import NUMPY
from plait.spec import WeightRef

_ALIGNMENT = 64
"""XLA takes a host array as it stands where it begins at a multiple of this, and copies it otherwise."""


def spec(*axes: str | None) -> PartitionSpec:
    """How an array lies over the chips: for each dimension the axis of the mesh that splits it."""
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def devices_of(chips: int, ordinal: int) -> list[Any]:
    """The `ordinal`-th group of this host's devices, counted again from the first where there are fewer."""
    here: list[Any] = jax.local_devices()
    first = ordinal % (len(here) // chips) * chips
    return here[first : first + chips]


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def weight_shape(weight: Weight, program: Program) -> tuple[int, ...]:
    """Of the array over all chips; (layers, rows, inputs) of a scanned matrix, (layers, experts, rows, inputs)."""
    split, sizes = program.split, program.sizes
    copies = split.chips if split.axis(weight.key) == 0 else 1
    rows = sum(split.rows_per_chip(name, sizes[name][0]) for name in weight.key) * copies
    return (*((len(weight.layers),) if weight.scanned else ()), rows, *sizes[weight.key[0]][1:])


def weight_spec(weight: Weight, split: Split) -> PartitionSpec:
    axis = split.axis(weight.key)
    if axis is None:
        return spec()
    return spec(*(None,) * (axis + weight.scanned), AXIS)


def pool_shape(pool: Pool, program: Program, pages: int) -> tuple[int, ...]:
    """Over all chips: (layers * pages * page_tokens, 2 N D), a chip's K of all heads and then its V, or K alone; for
    `pallas` (layers * pages * page_tokens, 2 N, D), a head's K and then its V."""
    heads, rows = program.split.kv_heads(pool.kv_heads), len(pool.kv) * pages * program.page_tokens
    if program.attention == "pallas":
        return rows, 2 * heads, pool.head_dim
    return rows, pool.sides * heads * pool.head_dim


def pool_rows(program: Program, *sides: NDArray[Any]) -> NDArray[Any]:
    """Rows of a pool from K and V (token, kv_head, head_dim), or from K alone."""
    count, heads, head_dim = sides[0].shape
    chips, held = program.split.chips, program.split.kv_heads(heads)
    parts = [np.repeat(side, held // heads, axis=1).reshape(count, chips, held // chips, head_dim) for side in sides]
    if program.attention == "pallas":
        return np.stack(parts, axis=3).reshape(count, 2 * held, head_dim)
    return np.stack(parts, axis=2).reshape(count, -1)


def pool_sides(program: Program, rows: NDArray[Any], heads: int, sides: int = 2) -> list[NDArray[Any]]:
    """The inverse of `pool_rows`."""
    chips, held = program.split.chips, program.split.kv_heads(heads)
    if program.attention == "pallas":
        parts = rows.reshape(len(rows), chips, held // chips, 2, -1).transpose(3, 0, 1, 2, 4)
    else:
        parts = rows.reshape(len(rows), chips, sides, held // chips, -1).transpose(2, 0, 1, 3, 4)
    return list(parts.reshape(sides, len(rows), held, -1)[:, :, :: held // heads])


POOL_SPEC = spec(None, AXIS)
"""A chip holds K and V of its heads."""


def held_dtype(dtype: str, wide: bool) -> np.dtype[Any]:
    """What a program holds values of a dtype in: XLA's CPU backend emulates 16-bit products, several times slower."""
    return np.dtype(np.float32) if wide else NUMPY[dtype]


def arguments(program: Program, shape: Shape, pages: Mapping[str, int], wide: bool) -> tuple[Any, ...]:
    """The arguments of `Program.trace` as shapes and dtypes."""

    def array(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)  # type: ignore[no-untyped-call]

    tokens, page_tokens = shape.tokens, program.page_tokens
    weights = [array(weight_shape(w, program), held_dtype(w.dtype, wide)) for w in program.weights]
    pools = [array(pool_shape(p, program, pages[p.kv_class]), held_dtype(p.dtype, wide)) for p in program.pools]
    inputs = {
        name: array((tokens, kind.shape[1] or 0), held_dtype(kind.dtype, wide)) for name, kind in program.inputs.items()
    }
    by_class = {name: shape.pages(window, page_tokens) for name, window in program.windows.items()}
    facts = {
        "tokens": array((tokens,), np.int32),
        "positions": array((tokens,), np.int32),
        "kv_lens": array((shape.sequences,), np.int32),
        "slots": {name: array((tokens,), np.int32) for name in by_class},
        "pages": {name: array((shape.sequences, width), np.int32) for name, width in by_class.items()},
        "first": {name: array((shape.sequences,), np.int32) for name in by_class},
    }
    halves = [array((tokens, table.rotary_dim // 2), np.float32) for table in program.tables]
    rows = array((1,), np.int32) if program.has_logits and not shape.every_row else None
    return weights, pools, inputs, facts, [(half, half) for half in halves], rows


def function(program: Program, mesh: Mesh) -> Callable[..., Any]:
    """`Program.trace`, on every chip of the mesh with its part. Logits stay split; the host joins them."""
    if program.split.chips == 1:
        return program.trace
    weights, pools = specs(program)
    whole = spec()
    return jax.shard_map(
        program.trace,
        mesh=mesh,
        in_specs=(weights, pools, whole, whole, whole, whole),
        out_specs=(output_specs(program), pools),
        check_vma=False,
    )


def specs(program: Program) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """How weights and pools lie over the chips."""
    return [weight_spec(weight, program.split) for weight in program.weights], [POOL_SPEC] * len(program.pools)


def output_specs(program: Program) -> dict[str, PartitionSpec]:
    """How outputs lie over the chips, by name."""
    return {name: spec(None, AXIS) if is_logits else spec() for name, (_, is_logits) in program.outputs.items()}


def read(
    weight: Weight, program: Program, refs: Mapping[str, WeightRef], root: Path | None, wide: bool
) -> NDArray[np.generic]:
    """The array of a weight over all chips. Takes itself and one tensor of the checkpoint."""
    split = program.split
    array = _aligned(weight_shape(weight, program), held_dtype(weight.dtype, wide))
    chips = split.chips if split.axis(weight.key) == 0 else 1
    layers = array if weight.scanned else array[None]
    if split.chips == 1 and array.dtype == NUMPY[weight.dtype]:
        for layer, names in zip(layers, weight.layers, strict=True):
            read_stacked([refs[name] for name in names], weight.dtype, root, layer)
        return array
    for layer, names in zip(layers, weight.layers, strict=True):
        own = layer.reshape(chips, -1, *layer.shape[1:])
        start = 0
        for name in names:
            tensor = read_weight(refs[name], weight.dtype, root)
            end = start + split.rows_per_chip(name, len(tensor))
            for chip in range(chips):
                part = tensor[split.rows(name, len(tensor), chip)]
                own[chip, start : start + len(part)] = part
                own[chip, start + len(part) : end] = 0
            start = end
    return array


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = np.empty(prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def sharding(mesh: Mesh, places: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, places)
