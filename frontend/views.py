"""Weights that are a part of a stored tensor, or several of them in one: fused q, k and v, experts one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from plait.errors import CheckpointError
from plait.frontend.files import some
from plait.spec import Piece, Rows, WeightRef
from plait.words import counted


@dataclass(frozen=True)
class View:
    """How a weight of the module is found in the checkpoint.

    Attributes:
        sources: names of stored tensors; several are stacked, in this order, along a new first dimension.
        rows: which of their rows, of all matrices of a stack together; None for all.
        transposed: a matrix is stored as (in, out), unless it is quantised: codes are joined to (out, in).
        flat: the tensor, of whatever shape, is a vector.
        vectors: the rows are those of each vector of a matrix (vectors, features).
        matrices: the rows become this many matrices of a stack, (matrices, rows / matrices, columns).
    """

    sources: tuple[str, ...]
    rows: Rows | None = None
    transposed: bool = False
    matrices: int | None = None
    flat: bool = False
    vectors: bool = False


def rows_of(name: str, start: int, count: int, of: int) -> View:
    """`count` neighbouring rows of `of`."""
    return View((name,), Rows(1, of, (Piece(start, count),)))


def with_prefix(weights: Mapping[str, WeightRef], prefix: str) -> dict[str, WeightRef]:
    """The weights with a prefix that all of their names lack."""
    if not prefix or any(name.startswith(prefix) for name in weights):
        return dict(weights)
    return {prefix + name: replace(ref, name=prefix + name) for name, ref in weights.items()}


def apply(weights: Mapping[str, WeightRef], views: Mapping[str, View], source: str) -> dict[str, WeightRef]:
    """The weights under the names that the module has for them. What no view takes keeps its name; a weight that is
    there under the module's name needs no view.

    Raises:
        CheckpointError: `tensor-missing`, `tensor-shape`, naming the stored tensors.
    """
    made: dict[str, WeightRef] = {}
    taken: set[str] = set()
    for name, view in views.items():
        missing = [part for part in view.sources if part not in weights]
        if missing and name in weights:
            continue
        if missing:
            raise CheckpointError(
                "tensor-missing",
                f"{source} lacks {counted(len(missing), 'tensor')} that its config asks for: {some(missing)}",
                why=f"{name!r} is made of them",
                hint="does the config belong to these weights?",
            )
        taken |= set(view.sources)
        made[name] = _made(name, [weights[part] for part in view.sources], view)
    return {name: ref for name, ref in weights.items() if name not in taken} | made


def _made(name: str, refs: list[WeightRef], view: View) -> WeightRef:
    if len(refs) > 1:
        parts = tuple(_one(ref.name, ref, replace(view, matrices=None)) for ref in refs)
        if len({(part.shape, part.encoding) for part in parts}) > 1:
            raise _wrong(name, refs, "they are stacked, and differ in shape or encoding")
        first = parts[0]
        return WeightRef(name, first.file, 0, 0, first.encoding, (len(parts), *first.shape), stack=parts)
    return _one(name, refs[0], view)


def _vectors(name: str, ref: WeightRef, view: View) -> WeightRef:
    """A matrix as a stack of its rows, each a vector of its own."""
    if len(ref.shape) != 2 or ref.scale is not None or ref.shape[0] == 0 or ref.nbytes % ref.shape[0]:
        raise _wrong(name, [ref], "it is no plain matrix")
    count, size = ref.shape[0], ref.nbytes // ref.shape[0]
    parts = tuple(
        _one(
            f"{ref.name}[{index}]",
            replace(ref, offset=ref.offset + index * size, nbytes=size, shape=ref.shape[1:]),
            replace(view, vectors=False),
        )
        for index in range(count)
    )
    return WeightRef(name, ref.file, 0, 0, ref.encoding, (count, *parts[0].shape), stack=parts)


def _stands_apart(ref: WeightRef, rows: Rows) -> bool:
    """Whether each run of rows is a matrix by itself in the file: not where rows are stored side by side, where a scale
    is for rows of several runs, or where all rows share one order of groups."""
    down = ref.block[0] if ref.block is not None else 1
    aside = ref.transposed or ref.packing in ("gptq", "awq") or ref.group_of is not None
    return not aside and down != 0 and rows.stride % down == 0


def _heads(name: str, ref: WeightRef, rows: Rows, matrices: int) -> WeightRef:
    """A stack whose matrices are rows of one matrix, each with the scales that its rows have there."""
    runs, total = rows.groups // matrices, rows.groups * rows.stride
    parts = []
    for matrix in range(matrices):
        pieces = tuple(
            replace(piece, start=piece.start + run * rows.stride)
            for run in range(matrix * runs, (matrix + 1) * runs)
            for piece in rows.pieces
        )
        parts.append(_one(f"{ref.name}[{matrix}]", ref, View((ref.name,), Rows(1, total, pieces))))
    return WeightRef(name, ref.file, 0, 0, ref.encoding, (matrices, *parts[0].shape), stack=tuple(parts))


def _one(name: str, ref: WeightRef, view: View) -> WeightRef:
    if view.vectors:
        return _vectors(name, ref, view)
    if view.matrices is not None and view.rows is not None and not _stands_apart(ref, view.rows):
        return _heads(name, ref, view.rows, view.matrices)
    shape, transposed = ref.shape, view.transposed and ref.scale is None
    if view.flat:
        shape = (prod(shape),)
    if transposed:
        if len(shape) < 2:
            raise _wrong(name, [ref], "it is no matrix")
        shape = (*shape[:-2], shape[-1], shape[-2])
    if view.rows is not None:
        if ref.rows is not None:
            raise _wrong(name, [ref], "its rows are in an order of their own already")
        lead, columns = (shape[:-1], shape[-1:]) if len(shape) > 1 else (shape, ())
        stored = prod(lead)
        if view.rows.groups * view.rows.stride != stored:
            raise _wrong(name, [ref], f"{view.rows.groups * view.rows.stride} rows are due, not {stored}")
        # Of a stack each matrix keeps its share of the rows.
        shape = (*shape[:-2], view.rows.count // prod(shape[:-2]), *columns) if columns else (view.rows.count,)
    if view.matrices is not None:
        if len(shape) < 2 or shape[-2] % view.matrices:
            raise _wrong(name, [ref], f"{list(shape)} is no stack of {view.matrices} matrices")
        shape = (view.matrices, shape[-2] // view.matrices, shape[-1])
    rows = ref.rows if view.rows is None else _each(name, ref, view.rows, prod(shape[:-2]))
    return replace(ref, name=name, shape=shape, rows=rows, transposed=transposed or ref.transposed)


def _each(name: str, ref: WeightRef, rows: Rows, matrices: int) -> Rows:
    """Rows of all matrices together as those of each one, which is how a weight says it."""
    if rows.groups % matrices:
        raise _wrong(name, [ref], f"{rows.groups} runs of rows are no {matrices} matrices")
    return replace(rows, groups=rows.groups // matrices)


def _wrong(name: str, refs: list[WeightRef], why: str) -> CheckpointError:
    stored = ", ".join(f"{ref.name!r} {list(ref.shape)}" for ref in refs[:5])
    return CheckpointError(
        "tensor-shape",
        f"{name!r} cannot be made of {stored}",
        why=why,
        hint="does the config belong to these weights?",
    )
