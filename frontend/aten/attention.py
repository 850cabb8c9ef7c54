"""Attention: scaled_dot_product_attention, or products with a softmax in between; its mask, its heads, its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plait.errors import UnsupportedError
from plait.frontend.aten import layout
from plait.frontend.aten.facts import Array
from plait.frontend.aten.formulas import MASKED, SCALED, SCORES, SOFTCAP, given, last_dim
from plait.frontend.aten.graph import SAME, SHAPE_ALONE, describe, op, operands, rank, refuse
from plait.frontend.aten.layout import Atom
from plait.frontend.aten.raiser import Past, Raiser, Symbol, Unary, View
from plait.frontend.graph.sample import Sample, reach

if TYPE_CHECKING:
    from torch.fx import Node

HIDDEN = -1e4
"""What is added to a score that nobody sees is at most this; models write the smallest number of their dtype."""

MOST_SQUARE = 8448
"""Tokens of the largest mask that is looked at whole."""

_SEEN = 64
"""Tokens beyond the sum of the numbers in a mask's making that it is looked at for."""

_ANYWAY = 2048
"""Tokens that it is looked at for, whatever the numbers."""

_PLAIN = SAME | SHAPE_ALONE | frozenset(
    [
        "arange", "zeros", "ones", "full", "scalar_tensor", "add", "sub", "rsub", "neg", "abs", "diff", "cumsum",
        "lt", "le", "gt", "ge", "eq", "ne", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not",
        "logical_and", "logical_or", "logical_not", "where", "masked_fill", "tril", "triu",
        "index", "slice", "select", "unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute",
    ]
)  # fmt: skip
"""Ops by which no edge of a mask lies further out than the sum of the numbers that it is made with. A product or a
quotient moves one anywhere."""

Masks = tuple[tuple["Node", Literal["added", "seen", "hidden"]], ...]


def sdpa(raiser: Raiser, node: Node) -> Symbol | None:
    said = given(node, "query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa")
    if said is None:
        refuse(node, "of its arguments query, key, value, attn_mask, is_causal, scale and enable_gqa are read")
    q, k, v = (raiser.symbol(said[name]) for name in ("query", "key", "value"))
    masks: Masks = ()
    if said["attn_mask"] is not None:
        mask = said["attn_mask"]
        masks = ((mask, "seen" if str(mask.meta["val"].dtype) == "torch.bool" else "added"),)
    scale = said["scale"]
    if scale is None:
        scale = raiser.graph.shape(said["query"])[-1] ** -0.5
    return _attend(raiser, node, q, k, v, masks, scale=float(scale), softcap=None,
                   causal=bool(said["is_causal"]), grouped=bool(said["enable_gqa"]))  # fmt: skip


def weighted(raiser: Raiser, node: Node) -> Symbol | None:
    """softmax(scores) v."""
    left, value = operands(node)[:2]
    softmax = raiser.graph.strip(left)
    if op(softmax) != "softmax" or not last_dim(softmax, operands(softmax)[1]):
        return None
    at: Any = operands(softmax)[0]
    masks: list[Any] = []
    while (found := raiser.matcher.first(MASKED, at)) is not None:
        if found["formula"] and found["hidden"] > HIDDEN:
            refuse(at, f"scores that are not seen become {found['hidden']}")
        masks.append((found["m"], ("added", "seen", "hidden")[found["formula"]]))
        at = found["x"]
    softcap, scale = None, 1.0
    if (found := raiser.matcher.first(SOFTCAP, at)) is not None:
        softcap, at = found["limit"], found["x"]
    while (found := raiser.matcher.first(SCALED, at)) is not None:
        scale *= found["factor"] if "factor" in found else 1 / found["divisor"]
        at = found["x"]
    found = raiser.matcher.first(SCORES, at)
    if found is None:
        refuse(at if at in raiser.graph.tainted else softmax, "it stands between the scores and their softmax")
    q, k, v = raiser.symbol(found["q"]), raiser.symbol(found["k"]), raiser.symbol(value)
    return _attend(raiser, node, q, _turned(k), v, tuple(masks), scale=scale, softcap=softcap)


def _turned(k: Symbol) -> Symbol:
    """K whose last two axes are the other way round."""
    if isinstance(k, Unary):
        inner = _turned(k.of)
        assert isinstance(inner, View | Unary)
        return replace(k, of=inner)
    return replace(k, axes=(*k.axes[:-2], k.axes[-1], k.axes[-2])) if isinstance(k, View) else k


def _attend(
    raiser: Raiser, node: Node, q: Symbol, k: Symbol, v: Symbol, masks: Masks, *,
    scale: float, softcap: float | None, causal: bool = False, grouped: bool = False,
) -> Symbol:  # fmt: skip
    scales = []
    values = []
    for item in (q, k, v):
        factor = 1.0
        while isinstance(item, Unary) and item.kind == "scale":
            factor, item = factor * item.number, item.of
        if not isinstance(item, View | Unary):
            refuse(node, "its query, key and value are not of the new tokens")
        scales.append(factor)
        values.append(item if isinstance(item, View) else raiser.write(item, node))
    if scales[2] != 1.0:
        refuse(node, "its values are scaled")
    query = raiser.write(values[0], node)
    token, width = query.axes[-2], layout.size(query.axes[-1])
    if [atom.kind for atom in token] != ["tokens"] or query.axes[-1] != layout.features(width):
        refuse(node, "its queries do not stand as [..., tokens, head_dim]")
    heads = prod(layout.size(axis) for axis in query.axes[:-2])
    (key, key_heads), (value, value_heads) = (_keys(raiser, node, query, item, heads, grouped) for item in values[1:])
    if key_heads != value_heads or layout.size(values[2].axes[-1]) != width:
        refuse(node, f"K has {key_heads} heads of {width}, V {value_heads} of {layout.size(values[2].axes[-1])}")
    pasts = [item.past for item in values[1:] if item.past is not None]
    if len(pasts) != (2 if raiser.graph.pasts else 0) or raiser.attended & set(pasts) or len(set(pasts)) < len(pasts):
        refuse(node, "its K and V are not those of one layer's cache, with the new tokens behind")
    if causal and pasts:
        refuse(node, "is_causal counts the new tokens from the first of the cache on")
    raiser.attended.update(pasts)
    arguments: dict[str, Any] = {
        "heads": heads, "kv_heads": key_heads, "head_dim": width, "scale": scale * scales[0] * scales[1],
        "window": _window(raiser, node, masks, causal), "softcap": softcap,
    }  # fmt: skip
    raiser.attentions += 1
    return raiser.step(lambda b, q, k, v: b.attention(q, k, v, **arguments), query, key, value, kind="attention")


def _keys(raiser: Raiser, node: Node, query: View, view: View, heads: int, grouped: bool) -> tuple[View, int]:
    """K or V of the new tokens as a step, and how many heads it has; each stands for as many query heads in a row."""
    leading = ((),) * (len(query.axes) - len(view.axes)) + view.axes[:-2]
    atoms: list[Atom] = []
    for queries, keys in zip(query.axes[:-2], leading, strict=True):
        due = layout.size(queries)
        repeated = grouped and layout.size(keys) != due
        atoms += keys
        if (not keys or repeated) and due > 1:
            atoms.append(Atom("repeat", due // layout.size(keys)))
    kinds = [atom.kind for atom in atoms]
    token = [atom.kind for atom in view.axes[-2]]
    own = layout.merged([atom for atom in atoms if atom.kind == "features"])
    if kinds != sorted(kinds) or prod(atom.size for atom in atoms) != heads or token != [_kind(view)]:
        refuse(node, "its keys or values do not stand as [..., tokens, head_dim], each for its neighbours of the heads")
    tokens = query.axes[-2]
    alone = replace(view, axes=(own, tokens, view.axes[-1]), past=None)
    return raiser.write(alone, node), prod(atom.size for atom in own)


def _kind(view: View) -> str:
    return "tokens" if view.past is None else "total"


def cached(raiser: Raiser, node: Node) -> Symbol | None:
    """K or V of the past, (1, KV heads, past, head_dim), and that of the new tokens behind it."""
    said = given(node, "tensors", "dim")
    assert said is not None
    tensors = [item for item in said["tensors"] if 0 not in raiser.graph.shape(item)]
    if not all(raiser.known(item) for item in tensors):
        return None
    found = [raiser.symbols[item] for item in tensors]
    if len(found) == 1:  # beside an empty tensor
        return found[0]
    past, view = found[0], found[1]
    if len(found) != 2 or not isinstance(past, Past) or not isinstance(view, View | Unary):
        return None
    if isinstance(view, Unary):
        view = raiser.write(view, node)
    shape = raiser.graph.shape(past.node)
    sizes = [layout.size(axis) for axis in view.axes]
    at = said["dim"] % rank(node)
    tokens = [atom.kind for atom in view.axes[at]] == ["tokens"]
    if at != 2 or not tokens or len(sizes) != 4 or (sizes[0], sizes[1], sizes[3]) != (1, shape[1], shape[3]):
        refuse(
            node, f"the cache {past.node.name!r} is {list(shape)} and gets {sizes}, not [1, KV heads, tokens, head_dim]"
        )
    total = (Atom("total", raiser.graph.far.total),)
    return replace(view, axes=(view.axes[0], view.axes[1], total, view.axes[3]), past=past.node)


def _window(raiser: Raiser, node: Node, masks: Masks, causal: bool) -> int | None:
    """The window of all masks together, None for all tokens before; they are held against it."""
    key = (*masks, causal)
    if key not in raiser.windows:
        raiser.windows[key] = _read_window(raiser, node, masks, causal)
    return raiser.windows[key]


def _read_window(raiser: Raiser, node: Node, masks: Masks, causal: bool) -> int | None:
    if not masks:
        if not causal:
            refuse(node, "it has no mask: each token would see those behind it", "mask")
        return None
    facts = raiser.facts
    for mask, _ in masks:
        if mask in raiser.graph.tainted:
            refuse(mask, "a mask that depends on the tokens")

    def there(positions: int) -> bool:
        new = facts.least if raiser.graph.pasts else max(facts.least, positions)
        sample = Sample(max(0, positions - new), new)
        try:
            return all(_spread(raiser, mask, sample).size > 0 for mask, _ in masks)
        except (UnsupportedError, ValueError):
            return False

    edge_at, tables = _made_of(raiser, masks)
    if tables:
        if not raiser.graph.pasts:
            _cut(raiser, facts.longest)
        facts.limit(reach(there, facts.longest))
    far = facts.last()
    if not raiser.graph.pasts:
        # A square: of a long sequence it is large. It says nothing new beyond the sum of the numbers in its making.
        most = far.total if edge_at is None else min(far.total, max(edge_at + _SEEN, _ANYWAY, facts.least))
        far = Sample(0, _cut(raiser, most))
    seen = int(_visible(raiser, node, masks, causal, far)[-1].sum())
    window = None if seen == far.total else seen
    edge = []
    if window is not None and raiser.graph.pasts:
        edge = [Sample(max(facts.least_past, window - 3), max(facts.least, min(7, facts.most or 7)))]
    for sample in (*facts.samples(), *(item for item in edge if item.total <= facts.longest), far):
        found = _visible(raiser, node, masks, causal, sample)
        places, positions = np.arange(sample.total), np.arange(sample.past, sample.total)[:, None]
        due = places <= positions
        if window is not None:
            due &= places > positions - window
        if (found != due).any():
            at, place = np.argwhere(found != due)[0]
            sees = "sees" if found[at, place] else "does not see"
            refuse(
                node, f"its mask is not causal with {window or 'no'} window: "
                f"the token at {sample.past + at} {sees} the one at {place}", "mask",
            )  # fmt: skip
    return window


def _cut(raiser: Raiser, due: int) -> int:
    """How many of `due` tokens a square mask is looked at for; if not for all, there are no longer sequences."""
    if due > MOST_SQUARE:
        raiser.notes.add(f"masks were looked at up to {MOST_SQUARE:,} tokens, which is the longest sequence")
        raiser.facts.limit(MOST_SQUARE)
    return min(due, MOST_SQUARE)


def _made_of(raiser: Raiser, masks: Masks) -> tuple[int | None, bool]:
    """The sum of the numbers that masks are made with, beyond which they have no edge; None where they are made of
    tables, or by other ops than `_PLAIN`. And whether there are tables."""
    stack, seen, numbers, tables, plain = [mask for mask, _ in masks], set(), [0], False, True
    while stack:
        item = stack.pop()
        if item in seen:
            continue
        seen.add(item)
        stack += item.all_input_nodes
        if item.op == "placeholder":
            number = None if item in raiser.graph.inputs else raiser.number(item)
            tables |= item not in raiser.graph.inputs and number is None
            numbers += _whole(number or 0)
        else:
            plain &= op(item) in _PLAIN
            numbers += _whole([*item.args, *item.kwargs.values()])
    return sum(numbers) if plain and not tables else None, tables


def _whole(args: Any) -> Sequence[int]:
    if isinstance(args, int) and not isinstance(args, bool) and abs(args) < 1 << 31:
        return [abs(args)]
    if isinstance(args, float) and HIDDEN < args < 1 << 31:  # what hides is no length
        return [int(abs(args))]
    return [number for item in args for number in _whole(item)] if isinstance(args, list | tuple) else []


def _visible(raiser: Raiser, node: Node, masks: Masks, causal: bool, sample: Sample) -> Array:
    """[new, total] whether a key is seen."""
    shape = sample.new, sample.total
    seen = np.tri(*shape, dtype=bool) if causal else np.ones(shape, bool)
    for mask, kind in masks:
        rows = _spread(raiser, mask, sample)
        if not (rows == rows[:1]).all():
            refuse(node, f"its mask differs between heads: {describe(mask)}", "mask")
        row = rows[0]
        if kind == "added":
            if not ((row == 0) | (row <= HIDDEN)).all():
                refuse(node, f"its mask adds to scores and does not only hide keys: {describe(mask)}", "mask")
            seen = seen & (row == 0)
        else:
            if row.dtype != np.bool_:
                refuse(node, f"its mask holds numbers: {describe(mask)}", "mask")
            seen = seen & (row if kind == "seen" else ~row)
    return seen


def _spread(raiser: Raiser, mask: Node, sample: Sample) -> Array:
    """A mask as [heads, new, total]. Raises ValueError where it is not there for so many tokens."""
    array, shape = raiser.facts.at(mask, sample), (sample.new, sample.total)
    return np.broadcast_to(array, (*array.shape[:-2], *shape)).reshape(-1, *shape)
