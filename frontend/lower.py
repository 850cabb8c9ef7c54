"""A checkpoint to a module of the IR, and the proof that the two cover each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.checkpoint import Checkpoint
from plait.frontend.config import DecoderConfig
from plait.frontend.families import family
from plait.frontend.families.base import HARMLESS
from plait.frontend.families.decoder import build_decoder
from plait.frontend.files import some, unreadable
from plait.frontend.safetensors import ENCODINGS
from plait.ir import ops, weights
from plait.ir.ops import ExpertsOp, LinearOp
from plait.ir.quant import GGUF, quant_type, quantise_types
from plait.ir.types import DTYPES, Quant
from plait.spec import WeightRef
from plait.words import counted

_COMPARE_BYTES = 1 << 24
"""Read at a time: two tables of gigabytes are compared in little memory."""


def lower(checkpoint: Checkpoint, dtype: str | None = None, *, read: bool = True, keep_blocks: bool = True) -> ModuleOp:
    """The module of the whole model, in `dtype` (default: the checkpoint's). Where there are weights they are checked.

    Weights with scales of their own stay quantised: `dtype` is that of activations and of the other weights.

    Args:
        read: compare the two copies of a tied table where the file holds both. All else is known from the headers.
        keep_blocks: GGUF's blocks stay quantised too. Otherwise the module has them in `dtype`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is used by no op, by name.
    """
    config, stored = checkpoint.config, checkpoint.weights
    if isinstance(config, DecoderConfig):
        module = build_decoder(config, dtype or checkpoint.dtype)
        quantise_types(module, _said(config, module) if stored is None else _stored(stored, keep_blocks))
    else:
        module = config.build(dtype or checkpoint.dtype)
        quantise_types(module, _stored(stored or {}, keep_blocks))
    if checkpoint.weights is not None:
        unused_tensors(checkpoint, module, read=read)
    return module


def unused_tensors(checkpoint: Checkpoint, module: ModuleOp, *, read: bool = True) -> dict[str, str]:
    """Tensors of the checkpoint that no op of the module needs, with the reason. Every other tensor is used, with the
    shape that the config says. `read` as in `lower`.

    Raises:
        CheckpointError: as `lower` says.
    """
    config, stored = checkpoint.config, checkpoint.weights or {}
    needed = {name: _shape(op.result.type) for name, op in weights(module).items()}
    _check_missing(checkpoint, stored, needed)
    _check_shapes(stored, needed)
    if not isinstance(config, DecoderConfig):
        return config.unused()
    _check_dtypes(checkpoint, stored, needed)
    said = config.quantisation
    harmless = {**HARMLESS, **family(config.family).unneeded(config)}
    if said is not None:
        harmless = {**harmless, **said.harmless}
    reasons: dict[str, str] = {}
    for name in stored.keys() - needed.keys():
        if config.tied and name == config.head:
            _check_tied(stored[config.embedding], stored[name], read)
            reasons[name] = f"tied: equal to {config.embedding}"
        elif reason := next((why for pattern, why in harmless.items() if re.fullmatch(pattern, name)), None):
            reasons[name] = reason
        elif said is not None and name.endswith(".bias") and _is_zero(stored[name]):
            reasons[name] = "a bias of zeros, which writers of quantised weights add"
    if strange := stored.keys() - needed.keys() - reasons.keys():
        raise CheckpointError(
            "tensor-unused",
            f"{checkpoint.name} holds {counted(len(strange), 'tensor')} that no op of a {checkpoint.family} uses: "
            + some(strange),
            why="a tensor that is left out in silence changes the model",
            hint="does the config belong to these weights?",
        )
    return reasons


def _stored(stored: Mapping[str, WeightRef], keep_blocks: bool) -> dict[str, Quant]:
    """The matrices that are stored quantised, and how; GGUF's blocks among them where asked."""
    kinds = {
        name: quant_type(ref)
        for name, ref in stored.items()
        if len(ref.shape) > 1 and (keep_blocks or ref.encoding not in GGUF)
    }
    # Blocks that are torn apart may leave rows that end inside a group: such a weight is dequantised when it is read.
    return {name: kind for name, kind in kinds.items() if kind is not None and kind.problem(stored[name].shape) is None}


def _said(config: DecoderConfig, module: ModuleOp) -> Mapping[str, Quant]:
    """What a config alone says: every linear and every stack of experts but the modules it skips. The dtype of scales
    is not known; float32 is the largest."""
    said = config.quantisation
    if said is None:
        return {}
    made: dict[SSAValue, str] = {op.result: name for name, op in weights(module).items()}
    matrices = [value for op in ops(module) for value in _matrices(op, said.EXPERTS_ALONE)]
    names = {made[value] for value in matrices if value in made}
    return {name: said.kind() for name in names if not said.skips(name.removesuffix(".weight"))}


def _matrices(op: Operation, experts_alone: bool) -> tuple[SSAValue, ...]:
    """The matrices that a quantiser takes from an op."""
    if isinstance(op, ExpertsOp):
        return op.stacks
    return (op.weight,) if isinstance(op, LinearOp) and not experts_alone else ()


def _shape(kind: object) -> tuple[int, ...]:
    assert isinstance(kind, TensorType)
    return tuple(kind.get_shape())


def _check_missing(
    checkpoint: Checkpoint, stored: Mapping[str, WeightRef], needed: Mapping[str, tuple[int, ...]]
) -> None:
    if missing := needed.keys() - stored.keys():
        raise CheckpointError(
            "tensor-missing",
            f"{checkpoint.name} lacks {counted(len(missing), 'tensor')} that its config asks for: {some(missing)}",
            why="a weight without a source would be random",
            hint='if the logits use the embedding, the config says "tie_word_embeddings": true'
            if isinstance(checkpoint.config, DecoderConfig) and missing == {checkpoint.config.head}
            else "does the config belong to these weights?",
        )


def _check_shapes(stored: Mapping[str, WeightRef], needed: Mapping[str, tuple[int, ...]]) -> None:
    wrong = sorted(name for name, shape in needed.items() if stored[name].shape != shape)
    if wrong:
        first = wrong[0]
        raise CheckpointError(
            "tensor-shape",
            f"{counted(len(wrong), 'tensor')} of another shape than the config says: {some(wrong)}",
            why=f"{first!r} is {list(stored[first].shape)} in the file and {list(needed[first])} by the config",
            hint="does the config belong to these weights? check head_dim, heads and vocab_size",
        )


def _check_dtypes(
    checkpoint: Checkpoint, stored: Mapping[str, WeightRef], needed: Mapping[str, tuple[int, ...]]
) -> None:
    """Whole numbers that no config explains are no weights."""
    for name in sorted(needed):
        ref = stored[name]
        if ref.encoding not in (*DTYPES, *GGUF) and quant_type(ref) is None:
            words = {encoding: dtype for dtype, (encoding, _) in ENCODINGS.items()}
            raise UnsupportedError(
                "dtype-unsupported",
                f"{checkpoint.name}: {name!r} is stored as {words.get(ref.encoding, ref.encoding)}",
                why="no op takes weights of this dtype, and no quantization_config says what they mean",
            )


def _is_zero(ref: WeightRef) -> bool:
    return not any(
        _bytes(ref, start, min(_COMPARE_BYTES, ref.nbytes - start)).any()
        for start in range(0, ref.nbytes, _COMPARE_BYTES)
    )


def _check_tied(embedding: WeightRef, head: WeightRef, read: bool) -> None:
    """A file may hold both names of a tied table; then they must be one table."""
    alike = (embedding.shape, embedding.encoding) == (head.shape, head.encoding)
    if not alike or (read and not _equal_bytes(embedding, head)):
        raise CheckpointError(
            "tied-differ",
            f"the config ties the logits to the embedding, but {head.name!r} in the file is another table",
            why="one of the two says something else about the model",
            hint='if the model is not tied, set "tie_word_embeddings": false',
        )


def _equal_bytes(a: WeightRef, b: WeightRef) -> bool:
    if (a.file, a.offset, a.nbytes) == (b.file, b.offset, b.nbytes):
        return True
    for start in range(0, a.nbytes, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, a.nbytes - start)
        if not np.array_equal(_bytes(a, start, count), _bytes(b, start, count)):
            return False
    return True


def _bytes(ref: WeightRef, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    try:
        return np.fromfile(ref.file, np.uint8, count=count, offset=ref.offset + start)
    except OSError as err:
        raise unreadable(Path(ref.file), err) from err
