"""GGUF's tensors under the names of a module's weights, with rows put in the module's order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config import Attention, DecoderConfig, Layer, Mlp
from plait.frontend.gguf.architectures import Architecture
from plait.frontend.views import rows_of
from plait.spec import Piece, Rows, WeightRef

_NAME = re.compile(r"(?:blk\.(?P<block>\d{1,6})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def named(
    tensors: Mapping[str, WeightRef], architecture: Architecture, config: DecoderConfig, source: str
) -> dict[str, WeightRef]:
    """The weights by the names that `config` has for them.

    Raises:
        UnsupportedError: a tensor that the architecture does not have, by name.
        CheckpointError: a tensor of another shape than the config says, by name.
    """
    found = [made for ref in tensors.values() for made in _one(ref, architecture, config, source)]
    return {ref.name: ref for ref in found}


def _one(ref: WeightRef, architecture: Architecture, config: DecoderConfig, source: str) -> list[WeightRef]:
    match = _NAME.fullmatch(ref.name)
    if match and match["block"] is None and (field := architecture.tensors.get(match["part"])):
        return [replace(ref, name=f"{getattr(config.names, field)}.{match['kind']}")]
    fields = architecture.parts.get(match["part"]) if match and match["block"] is not None else None
    if match is None or fields is None:
        raise UnsupportedError(
            "gguf-tensor-unknown", f"{source} holds the tensor {ref.name!r}, which plait does not understand"
        )
    index = int(match["block"])
    if index >= config.blocks:
        raise CheckpointError(
            "gguf-tensor-unknown", f"{source} holds {ref.name!r} and has {config.blocks} blocks by its block_count"
        )
    layer, prefix = config.layers[index], config.names.block.format(index)
    names = [prefix + _called(field, match["kind"], config) for field in fields]
    if len(names) > 1:
        return _split(ref, names, [_rows(layer, field) for field in fields], source)
    rows = _paired(ref, _heads(layer, match["part"]), source) if architecture.paired else None
    return [replace(ref, name=names[0], rows=rows)]


def _called(field: str, kind: str, config: DecoderConfig) -> str:
    name, _, rest = field.partition(".")
    called: str = getattr(config.names, name) + rest
    return called if name == "sinks" else f"{called}.{kind}"


def _rows(layer: Layer, field: str) -> int:
    """Rows of one of several matrices that stand in one tensor."""
    own, mlp = layer.attention, layer.mlp
    assert isinstance(own, Attention) and isinstance(mlp, Mlp), "the architectures with fused rows"
    kv = own.kv_heads * own.head_dim
    sizes = {
        "q": own.heads * own.head_dim,
        "k": kv,
        "v": kv,
        "gate": mlp.intermediate_size,
        "up": mlp.intermediate_size,
    }
    return sizes[field]


def _split(ref: WeightRef, names: list[str], counts: list[int], source: str) -> list[WeightRef]:
    """The matrices, or biases, whose rows stand one behind the other."""
    total, tail = sum(counts), ref.shape[1:]
    if ref.shape[0] != total:
        raise CheckpointError(
            "gguf-shape", f"{source}: {ref.name!r} has {ref.shape[0]} rows", why=f"by the config they are {total}"
        )
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return [
        replace(ref, name=name, shape=(end - start, *tail), rows=rows_of(ref.name, start, end - start, total).rows)
        for name, (start, end) in zip(names, pairwise(starts), strict=True)
    ]


def _heads(layer: Layer, part: str) -> int | None:
    own = layer.attention
    assert isinstance(own, Attention), "no architecture here has latent attention"
    return {"attn_q": own.heads, "attn_k": own.kv_heads}.get(part)


def _paired(ref: WeightRef, heads: int | None, source: str) -> Rows | None:
    """Rows of each head that stand as rope pairs."""
    if heads is None:
        return None
    count = ref.shape[0]
    if count % (2 * heads):
        raise CheckpointError(
            "gguf-shape", f"{source}: the {count} rows of {ref.name!r} are not {heads} heads of pairs"
        )
    return Rows(heads, count // heads, (Piece(0, count // heads, pairs=True),))
