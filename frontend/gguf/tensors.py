"""GGUF's tensors under the names of a module's weights, with rows put in the module's order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config import Attention, DecoderConfig, Layer, Mlp
from plait.frontend.gguf.architectures import Architecture
from plait.spec import Piece, Rows, WeightRef
from plait.words import counted

_NAME = re.compile(r"(?:blk\.(?P<block>\d{1,6})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def named(
    tensors: Mapping[str, WeightRef], architecture: Architecture, config: DecoderConfig, source: str
) -> dict[str, WeightRef]:
    """The weights by the names that `config` has for them.

    Raises:
        UnsupportedError: a tensor that the architecture does not have, by name.
        CheckpointError: a tensor of another shape than the config says, by name.
    """
    made: dict[str, WeightRef] = {}
    for ref in tensors.values():
        for part in _parts(ref, tensors, architecture, config, source):
            if part.name in made:
                raise CheckpointError(
                    "gguf-tensor-twice",
                    f"{source} holds {part.name!r} twice",
                    why=f"{ref.name!r} stands beside tensors that are parts of it",
                )
            made[part.name] = part
    return made


def _parts(
    ref: WeightRef,
    tensors: Mapping[str, WeightRef],
    architecture: Architecture,
    config: DecoderConfig,
    source: str,
) -> list[WeightRef]:
    """The weights that a tensor holds."""
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
    if fields == ("up",) and "ffn_gate" in architecture.parts and f"blk.{index}.ffn_gate.weight" not in tensors:
        fields = ("gate", "up")
    names = [prefix + _called(field, match["kind"], config) for field in fields]
    heads = [_heads(layer, field) if architecture.paired else None for field in fields]
    if len(names) > 1:
        return _split(ref, names, [_rows(layer, field) for field in fields], heads, source)
    return [replace(ref, name=names[0], rows=_paired(ref, heads[0], source))]


def _called(field: str, kind: str, config: DecoderConfig) -> str:
    name, _, rest = field.partition(".")
    called: str = getattr(config.names, name) + rest
    return called if name == "sinks" else f"{called}.{kind}"


def _rows(layer: Layer, field: str) -> int:
    """Rows of one of several matrices that stand in one tensor."""
    own, mlp = layer.attention, layer.mlp
    assert isinstance(own, Attention), "no architecture here has latent attention"
    if field in ("gate", "up"):
        assert isinstance(mlp, Mlp), "experts have names of their own"
        return mlp.intermediate_size
    return (own.heads if field == "q" else own.kv_heads) * own.head_dim


def _split(
    ref: WeightRef, names: list[str], counts: list[int], heads: list[int | None], source: str
) -> list[WeightRef]:
    """The matrices, or biases, whose rows stand one behind the other; those with `heads` as rope pairs."""
    total, tail = sum(counts), ref.shape[1:]
    if ref.shape[0] != total:
        raise CheckpointError(
            "gguf-shape",
            f"{source}: {ref.name!r} has {counted(ref.shape[0], 'row')}",
            why=f"by the config it holds {' and '.join(names)}, which have {total}",
        )
    made, start = [], 0
    for name, count, paired in zip(names, counts, heads, strict=True):
        size = count // (paired or 1)
        pieces = tuple(Piece(at, size, pairs=paired is not None) for at in range(start, start + count, size))
        made.append(replace(ref, name=name, shape=(count, *tail), rows=Rows(1, total, pieces)))
        start += count
    return made


def _heads(layer: Layer, field: str) -> int | None:
    """Of q and k."""
    own = layer.attention
    assert isinstance(own, Attention), "no architecture here has latent attention"
    return {"q": own.heads, "k": own.kv_heads}.get(field)


def _paired(ref: WeightRef, heads: int | None, source: str) -> Rows | None:
    """Rows of each head that stand as rope pairs."""
    if heads is None:
        return None
    count = ref.shape[0]
    if count % (2 * heads):
        raise CheckpointError(
            "gguf-shape",
            f"{source}: {ref.name!r} has {counted(count, 'row')}, which are no pairs of {counted(heads, 'head')}",
        )
    return Rows(heads, count // heads, (Piece(0, count // heads, pairs=True),))
