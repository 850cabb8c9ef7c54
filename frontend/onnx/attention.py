"""Attention nodes, with what belongs to them: rope tables, masks, the KV cache that goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.errors import UnsupportedError
from plait.frontend.graph.rope import recover
from plait.frontend.graph.sample import Sample, reach
from plait.frontend.graph.weights import take_pairs
from plait.frontend.onnx.facts import SAMPLES, Array, describe
from plait.frontend.onnx.file import ENCODINGS, dimensions, refuse
from plait.frontend.onnx.nodes import MS, decimal, handles, part
from plait.frontend.onnx.raiser import Act, Cache, Product, Raiser, Symbol
from plait.ir import Rope
from plait.words import counted

if TYPE_CHECKING:
    import onnx_ir as ir

HIDDEN = -1e4
"""What is added to a score that nobody sees is at most this; exporters write the smallest number of their dtype."""


@dataclass(frozen=True)
class Heads:
    """What an attention node says of itself."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None


@handles(
    MS,
    "GroupQueryAttention",
    inputs=16,
    needs=1,
    only={
        "causal": (1,),
        "smooth_softmax": (-1, 0),
        "qk_output": (0,),
        "k_quant_type": ("NONE",),
        "v_quant_type": ("NONE",),
        "kv_cache_bit_width": (0,),
    },
    num_heads=0,
    kv_num_heads=0,
    scale=0.0,
    softcap=0.0,
    local_window_size=-1,
    do_rotary=0,
    rotary_interleaved=0,
    sliding_window_cache=0,
    qk_norm_epsilon=1e-6,
    q_norm_epsilon=0.0,
    k_norm_epsilon=0.0,
)
def _group_query(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    heads, kv_heads = given["num_heads"], given["kv_num_heads"]
    packed = _input(node, 1) is None
    qkv = _unpacked(raiser, node, heads, kv_heads) if packed else [raiser.symbol(node, index) for index in range(3)]
    head_dim = qkv[0].width // max(1, heads)
    raiser.check(node, 6, lambda sample: np.array(sample.total), "the length of the sequence")
    raiser.check(node, 5, lambda sample: np.array(sample.total - 1), "the length of the sequence less one")
    if _input(node, 12) is not None or _input(node, 13) is not None:
        refuse("attribute", f"{describe(node)}: its KV cache has scales, and is not raised")
    for index, at in ((0, 14), (1, 15)):
        if _input(node, at) is not None:
            name = "q_norm_epsilon" if index == 0 else "k_norm_epsilon"
            eps = given[name] or given["qk_norm_epsilon"]
            qkv[index] = _head_norm(raiser, node, qkv[index], at, head_dim, eps)
    if given["do_rotary"]:
        rope, rotary_dim = _table(raiser, node, 7, 8)
        raiser.check(node, 9, _positions, "the positions of the new tokens")
        turn = bool(given["rotary_interleaved"])
        qkv[:2] = [_rotated(raiser, node, x, head_dim, rope, rotary_dim, turn) for x in qkv[:2]]
    size = given["local_window_size"]
    if given["sliding_window_cache"] and size < 1:  # where keys lie, not which are seen
        refuse(
            "attribute", f"{describe(node)}: sliding_window_cache is {given['sliding_window_cache']} without a window"
        )
    windows = {size if size > 0 else None}
    if _input(node, 10) is not None:
        windows = {_both(windows.pop(), _window(raiser, node, 10, causal=True))}
    sinks = raiser.vector(node, 11, heads) if _input(node, 11) is not None else None
    scale = _scale(given["scale"], head_dim)
    said = Heads(heads, kv_heads, head_dim, scale, windows.pop(), given["softcap"] or None, sinks)
    _attention(raiser, node, [raiser.write(x, node) for x in qkv], said, past=3)


def _head_norm(raiser: Raiser, node: ir.Node, x: Symbol, weight: int, head_dim: int, eps: float) -> Act:
    act, name, number = raiser.write(x, node), raiser.vector(node, weight, head_dim), decimal(eps)
    step = raiser.tape.add(lambda b, x: b.rms_norm(x, name, number, group=head_dim), [act.step])
    return replace(act, step=step)


def _unpacked(raiser: Raiser, node: ir.Node, heads: int, kv_heads: int) -> list[Symbol]:
    """q, k and v of one product."""
    fused, together = raiser.symbol(node, 0), heads + 2 * kv_heads
    if not isinstance(fused, Product) or min(heads, kv_heads) < 1 or fused.width % together:
        refuse("node", f"{describe(node)}: its packed q, k and v are no product of {heads} + 2 x {kv_heads} heads")
    head_dim = fused.width // together
    q, kv = heads * head_dim, kv_heads * head_dim
    return [part(fused, 0, q), part(fused, q, kv), part(fused, q + kv, kv)]


@handles(
    "",
    "Attention",
    inputs=6,
    needs=3,
    only={"qk_matmul_output_mode": (0,), "softmax_precision": (1, 10, 16)},
    q_num_heads=0,
    kv_num_heads=0,
    scale=0.0,
    softcap=0.0,
    is_causal=0,
)
def _onnx_attention(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    q, k, v = (raiser.act(node, index) for index in range(3))
    heads, kv_heads = ((given["q_num_heads"], given["kv_num_heads"]) if len(q.dims) == 3
                       else (x.dims[1] for x in (q, k)))  # fmt: skip
    for x, count in ((q, heads), (k, kv_heads), (v, kv_heads)):
        by_head = (len(x.dims), x.by_head) == (4, True) and x.dims[1] == count
        if not (by_head or len(x.dims) == 3) or count < 1 or x.width % count:
            refuse("node", f"{describe(node)}: q, k or v is {list(x.dims)}, and {count} heads are said")
    head_dim = q.width // heads
    window = _window(raiser, node, 3, causal=bool(given["is_causal"]))
    scale = _scale(given["scale"], head_dim)
    said = Heads(heads, kv_heads, head_dim, scale, window, given["softcap"] or None, None)
    _attention(raiser, node, [q, k, v], said, past=4)


def _scale(stated: float, head_dim: int) -> float:
    return decimal(stated) if stated else head_dim**-0.5


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _attention(raiser: Raiser, node: ir.Node, qkv: list[Act], said: Heads, past: int) -> None:
    q, k, v = qkv
    narrow = said.kv_heads * said.head_dim
    if said.heads * said.head_dim != q.width or (k.width, v.width) != (narrow, narrow):
        refuse("node", f"{describe(node)}: q, k and v of {q.width}, {k.width} and {v.width} features are not {said}")
    if said.heads % said.kv_heads:
        refuse("node", f"{describe(node)}: {said.heads} heads do not divide among {said.kv_heads} KV heads")
    for index in (0, 1):
        value, made = _input(node, past + index), node.outputs[1 + index] if len(node.outputs) > 2 else None
        if value is None or made is None or not value.is_graph_input() or not made.is_graph_output():
            refuse("cache", f"{describe(node)} has no KV cache that goes into the graph and comes out of it",
                   hint="export the model with past key values")  # fmt: skip
        if value.name in raiser.attended:
            refuse("cache", f"{describe(node)} attends to {value.name!r}, as another node does")
        raiser.attended.add(value.name or "")
        raiser.give(node, Cache(said.kv_heads, said.head_dim), 1 + index)
    raiser.attentions += 1
    arguments: dict[str, Any] = {
        "heads": said.heads,
        "kv_heads": said.kv_heads,
        "head_dim": said.head_dim,
        "scale": said.scale,
        "window": said.window,
        "softcap": said.softcap,
        "sinks": said.sinks,
    }
    raiser.add(node, lambda b, q, k, v: b.attention(q, k, v, **arguments), q, k, v, like=q, kind="attention")


def past_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of an attention node that hold K and V of the past."""
    first = {(MS, "GroupQueryAttention"): 3, ("", "Attention"): 4}.get((node.domain, node.op_type))
    found = [] if first is None else [_input(node, first), _input(node, first + 1)]
    return [value for value in found if value is not None]


@handles(
    MS, "RotaryEmbedding", inputs=4, needs=1, only={"scale": (1.0,), "is_packed_batching": (0,)},
    interleaved=0, num_heads=0, rotary_embedding_dim=0,
)  # fmt: skip
def _rotary_ms(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    raiser.check(node, 1, _positions, "the positions of the new tokens")
    _rotary(raiser, node, given, *_table(raiser, node, 2, 3))


@handles("", "RotaryEmbedding", inputs=4, needs=1, interleaved=0, num_heads=0, rotary_embedding_dim=0)
def _rotary_onnx(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    if _input(node, 3) is None:
        _rotary(raiser, node, given, *_gathered(raiser, node, 1, 2))
        return
    table = _table(raiser, node, 1, 2)
    raiser.check(node, 3, _positions, "the positions of the new tokens")
    _rotary(raiser, node, given, *table)


def _positions(sample: Sample) -> Array:
    return sample.positions


def _rotary(raiser: Raiser, node: ir.Node, given: dict[str, Any], rope: Rope, rotary_dim: int) -> None:
    x = raiser.symbol(node, 0)
    heads = given["num_heads"]
    head_dim = x.dims[-1] if len(x.dims) == 4 else x.width // heads if heads else rotary_dim
    stated = given["rotary_embedding_dim"] or rotary_dim
    if stated != rotary_dim or rotary_dim > head_dim or x.width % head_dim:
        refuse("node", f"{describe(node)}: {stated} of {head_dim} features turn, by {rotary_dim // 2} pairs")
    turned = _rotated(raiser, node, x, head_dim, rope, rotary_dim, bool(given["interleaved"]))
    raiser.give(node, turned)


def _rotated(
    raiser: Raiser, node: ir.Node, x: Symbol, head_dim: int, rope: Rope, rotary_dim: int, interleaved: bool
) -> Act:
    if interleaved:
        if not isinstance(x, Product):
            refuse("node", f"{describe(node)} turns neighbours of what is no product",
                   "rows of weights can be put in order, other numbers cannot")  # fmt: skip
        bias = None if x.bias is None else take_pairs(x.bias, head_dim, rotary_dim)
        x = replace(x, weight=take_pairs(x.weight, head_dim, rotary_dim), bias=bias)
    act = raiser.write(x, node)
    step = raiser.tape.add(lambda b, x: b.rope(x, head_dim, rope, rotary_dim), [act.step])
    return replace(act, step=step)


def _table(raiser: Raiser, node: ir.Node, cos: int, sin: int) -> tuple[Rope, int]:
    """The rope whose tables [positions, pairs] two inputs are, and its rotary dim."""
    values = [_input(node, index) for index in (cos, sin)]
    named = [value.name or "" for value in values if value is not None]
    if len(named) < 2:
        refuse("rope", f"{describe(node)} has no tables of cosines and sines")
    key = named[0], named[1]
    if key not in raiser.ropes:
        read = [_rows(raiser, value) for value in values if value is not None]
        (cosines, dtype), (sines, _) = read
        if cosines.ndim != 2:
            refuse("rope", f"{describe(node)}: the table {named[0]!r} is {list(cosines.shape)}")
        raiser.limit(len(cosines))
        what = f"{describe(node)}: {named[0]!r}"
        raiser.ropes[key] = recover(cosines, sines, np.arange(len(cosines)), dtype, what), 2 * cosines.shape[1]
    return raiser.ropes[key]


def _rows(raiser: Raiser, value: ir.Value) -> tuple[Array, str]:
    """A table, and what it is stored in."""
    if not value.is_initializer():
        table = raiser.facts.constant(value)
        return table, table.dtype.name
    assert value.const_value is not None
    tensor = value.const_value
    path, offset, _ = raiser.file.place(tensor)
    table = np.memmap(path, tensor.dtype.numpy(), "r", offset, dimensions(tensor))
    return table, ENCODINGS.get(tensor.dtype.name, "float32")


def _gathered(raiser: Raiser, node: ir.Node, cos: int, sin: int) -> tuple[Rope, int]:
    """The rope whose rows for the new tokens two inputs are, (1, tokens, pairs); looked at near and far."""
    values = [value for value in (_input(node, cos), _input(node, sin)) if value is not None]
    if len(values) < 2:
        refuse("rope", f"{describe(node)} has no tables of cosines and sines")
    key = values[0].name or "", values[1].name or ""
    if key not in raiser.ropes:
        if (reach := _reach(raiser, values[0])) < raiser.longest:
            raiser.limit(reach)
        near = Sample(0, min(256, raiser.longest))
        far = [Sample(1 << n, 1) for n in range(8, raiser.longest.bit_length()) if 1 << n < raiser.longest]
        samples = [near, *(sample for sample in far if sample.past >= near.new)]
        cosines, sines = (_rows_of(raiser, node, value, samples) for value in values)
        for sample in SAMPLES:  # later chunks look up their own rows
            for name, value, table in zip(key, values, (cosines, sines), strict=True):
                rows = _rows_of(raiser, node, value, [sample])
                if not np.array_equal(rows, table[sample.past : sample.total]):
                    refuse("rope", f"{describe(node)}: the rows of {name!r} are not those of the new tokens' positions")
        positions = np.concatenate([sample.positions for sample in samples])
        what = f"{describe(node)}: {key[0]!r}"
        raiser.ropes[key] = recover(cosines, sines, positions, cosines.dtype.name, what), 2 * cosines.shape[1]
    return raiser.ropes[key]


def _rows_of(raiser: Raiser, node: ir.Node, value: ir.Value, samples: Sequence[Sample]) -> Array:
    """What a value holds for the new tokens of the samples, (tokens, features)."""
    found = [(raiser.facts.at(value, sample), sample.new) for sample in samples]
    if any(made.size % new for made, new in found) or len({made.size // new for made, new in found}) > 1:
        shapes = ", ".join(f"{list(made.shape)} for {counted(new, 'token')}" for made, new in found)
        refuse("rope", f"{describe(node)}: {value.name!r} holds no row for each new token: {shapes:.200}")
    return np.concatenate([made.reshape(new, -1) for made, new in found])


def _reach(raiser: Raiser, value: ir.Value) -> int:
    """How many positions there are rows for, up to the longest that is asked for."""

    def there(positions: int) -> bool:
        try:
            raiser.facts.at(value, Sample(positions - 1, 1))
        except UnsupportedError:
            return False
        return True

    return reach(there, raiser.longest)


def _window(raiser: Raiser, node: ir.Node, index: int, *, causal: bool) -> int | None:
    """The window of a mask, None for all tokens before; the mask is held against it.

    Args:
        causal: the node itself hides later tokens; a mask need not.
    """
    value = _input(node, index)
    if value is None:
        if not causal:
            refuse("mask", f"{describe(node)} is not causal and has no mask", "each token would see those behind it")
        return None
    longest = raiser.longest
    row = _visible(raiser, node, value, Sample(longest - 1, 1))
    seen = int(row.sum())
    if not seen:
        refuse("mask", f"{describe(node)}: its mask {value.name!r} lets the last token see nothing")
    window = None if seen == longest else seen
    edge = [] if window is None else [Sample(max(0, window - 3), min(7, longest - window))]
    for sample in (*SAMPLES, *(item for item in edge if item.new > 0), Sample(longest - 1, 1)):
        found = _visible(raiser, node, value, sample)
        places, positions = np.arange(sample.total), sample.positions[:, None]
        behind = places > positions
        due = ~behind if window is None else ~behind & (places > positions - window)
        wrong = (found != due) & (~behind if causal else True)
        if wrong.any():
            at, place = np.argwhere(wrong)[0]
            refuse(
                "mask",
                f"{describe(node)}: its mask {value.name!r} is not causal with {window or 'no'} window",
                f"the token at {sample.past + at} {'sees' if found[at, place] else 'does not see'} the one at {place}",
            )
    return window


def _visible(raiser: Raiser, node: ir.Node, value: ir.Value, sample: Sample) -> Array:
    """[new, total] whether a key is seen."""
    mask = raiser.facts.at(value, sample)
    try:
        rows = np.broadcast_to(mask, (1, max(1, mask.shape[1] if mask.ndim == 4 else 1), sample.new, sample.total))[0]
    except ValueError:
        refuse("mask", f"{describe(node)}: its mask {value.name!r} is {list(mask.shape)} for {sample}")
    if not (rows == rows[:1]).all():
        refuse("mask", f"{describe(node)}: its mask {value.name!r} differs between heads")
    if mask.dtype == np.bool_:
        return np.asarray(rows[0])
    seen = rows[0] == 0
    if not (seen | (rows[0] <= HIDDEN)).all():
        refuse("mask", f"{describe(node)}: {value.name!r} adds to scores and does not only hide keys")
    return np.asarray(seen)


def _both(one: int | None, other: int | None) -> int | None:
    known = [size for size in (one, other) if size is not None]
    return min(known) if known else None
