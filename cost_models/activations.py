"""What a step holds beside weights and KV pages: the values that are alive at once, and what kernels need meanwhile.

A value lives from the op that makes it to the last that reads it. Products of one input are computed as one, and their
results lie in one piece, which lives as long as any of them; an addition goes with the normalisation of its sum. The
peak of a unit is the op with the most. Not counted are rotary tables, masks and what kernels
take whatever the step (0.15 MB for each thread of an attention), which are part of the reserve.

Only of torch on the host is it known here what kernels need (`HOST`). For other backends, and for ops that are not
named here, all results of a unit are the bound: their own plans reuse memory and add workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from plait.ir.ops import CACHING, SCORING, AddOp, LinearOp, PlaitOp, RmsNormOp, WeightOp
from plait.ir.types import dtype_bytes, tensor_bytes

_WIDE = 4
"""Bytes of the float32 that kernels compute in."""


@dataclass(frozen=True)
class Held:
    """One op, in bytes per token of the step.

    Attributes:
        alive: values that stand while it runs: its inputs, and what a later op reads.
        results: what it makes; nothing for logits, which are counted by themselves.
        width, element: features of its first input (of the sum, for an addition), and bytes of one.
        gathers: it reads KV pages.
    """

    name: str
    alive: int
    results: int
    width: int
    element: int
    gathers: bool = False


Extra = Callable[[Held], int]


def _norm(op: Held) -> int:
    """The input in float32 and itself, where the result is in 16 bits."""
    return 0 if op.element == _WIDE else 2 * _WIDE * op.width


def _layer_norm(op: Held) -> int:
    """What was normalised and scaled; in 16 bits the input in float32, too, and the result comes after."""
    return _WIDE * op.width if op.element == _WIDE else 3 * _WIDE * op.width


def _rope(op: Held) -> int:
    """x cos and x rolled; in 16 bits beside x and the sum in float32, before the result."""
    return 2 * _WIDE * op.width if op.element == _WIDE else 4 * _WIDE * op.width - op.results


def _gated(op: Held) -> int:
    """In 16 bits gate and its activation, then that and up, stand in float32 before the result."""
    return 0 if op.element == _WIDE else 2 * _WIDE * op.width - op.results


def _attention(op: Held) -> int:
    """What one part gives, before it is put into the whole."""
    return op.results


def _nothing(op: Held) -> int:
    return 0


#: Op -> bytes per token that torch's kernels on the host hold beside inputs and results
#: (`backends.kernels.torch_eager`).
HOST: Mapping[str, Extra] = {
    **dict.fromkeys(("plait.embed", "plait.embed_positions", "plait.linear", "plait.add", "plait.logits"), _nothing),
    **dict.fromkeys(("plait.rms_norm", "plait.add_rms_norm"), _norm),
    **dict.fromkeys(("plait.silu_mul", "plait.gelu_mul", "plait.gelu"), _gated),
    "plait.layer_norm": _layer_norm,
    "plait.rope": _rope,
    "plait.attention": _attention,
}


def peak(ops: Sequence[Held], extra: Mapping[str, Extra], tokens: int, gathered: int) -> int | None:
    """Bytes of the op that holds the most in a step; None where one is not known.

    Args:
        gathered: bytes of K and V that an attention copies out of its pages.
    """
    if not ops or any(op.name not in extra for op in ops):
        return None
    return max((op.alive + op.results + max(0, extra[op.name](op))) * tokens + gathered * op.gathers for op in ops)


def gathered_tokens(tokens: int, page_tokens: int) -> int:
    """Tokens that torch on the host reads of a sequence of some: whole pages, whose number it rounds up to 1, 2, 3, 4,
    6, 8, 12, 16 ..., so that sequences of about one length go together (`kernels.step`)."""
    pages = max(1, -(-tokens // page_tokens))
    power = 1 << (pages - 1).bit_length()
    return page_tokens * (power * 3 // 4 if pages <= power * 3 // 4 and power >= 4 else power)


def held(group: Sequence[PlaitOp], unit_of: Mapping[PlaitOp, int], through: int = 0) -> tuple[Held, ...]:
    """The ops of one unit, in order.

    Args:
        unit_of: the unit of every op of the module.
        through: bytes per token of values that pass the unit by.
    """
    if not group:
        return ()
    me, runs = unit_of[group[0]], _runs(group)
    place = {op: number for number, run in enumerate(runs) for op in run}

    def end(value: SSAValue) -> int:
        """The last run that reads it; past them all for what a later unit or nobody here reads."""
        readers = [use.operation for use in value.uses]
        stays = any(not isinstance(reader, PlaitOp) or unit_of.get(reader, me) > me for reader in readers)
        return (
            len(runs)
            if stays
            else max((place[r] for r in readers if isinstance(r, PlaitOp) and r in place), default=-1)
        )

    pieces = [(-1, end(value), tensor_bytes(_tensor(value))) for value in _outside(group, place)]
    for number, run in enumerate(runs):
        made = [(end(value), tensor_bytes(_tensor(value))) for op in run for value in op.results]
        if isinstance(run[0], LinearOp):
            made = [(max(last for last, _ in made), sum(size for _, size in made))]
        pieces += [(number, last, size) for last, size in made]
    return tuple(
        Held(
            _name(run),
            through + sum(size for first, last, size in pieces if first < number <= last),
            sum(size for first, _, size in pieces if first == number) * (not isinstance(run[0], SCORING)),
            *_width(run[-1]),
            isinstance(run[0], CACHING),
        )
        for number, run in enumerate(runs)
    )


def _runs(group: Sequence[PlaitOp]) -> list[list[PlaitOp]]:
    """Ops that are computed together (`ir.passes.fuse`): products at the place of the first, additions at that of the
    normalisation."""
    runs: list[list[PlaitOp]] = []
    products: dict[tuple[SSAValue, bool], list[PlaitOp]] = {}
    for op in group:
        if isinstance(op, LinearOp) and (op.x, op.bias is not None) in products:
            products[op.x, op.bias is not None].append(op)
            continue
        if isinstance(op, RmsNormOp) and op.group is None:
            added = next((run for run in runs if run[0] is op.x.owner and isinstance(run[0], AddOp)), None)
            if added is not None and len(added) == 1 and not _is_read(added[0], runs[runs.index(added) + 1 :]):
                runs.remove(added)
                runs.append([*added, op])
                continue
        runs.append([op])
        if isinstance(op, LinearOp):
            products[op.x, op.bias is not None] = runs[-1]
    return runs


def _is_read(op: PlaitOp, runs: Sequence[Sequence[PlaitOp]]) -> bool:
    return any(value.owner is op for run in runs for one in run for value in one.operands)


def _name(run: list[PlaitOp]) -> str:
    return "plait.add_rms_norm" if isinstance(run[0], AddOp) and len(run) > 1 else run[0].name


def _outside(group: Sequence[PlaitOp], place: Mapping[PlaitOp, int]) -> list[SSAValue]:
    """Activations that the unit reads and did not make."""
    values = (value for op in group for value in op.operands if isinstance(value.type, TensorType))
    return [v for v in dict.fromkeys(values) if not isinstance(v.owner, WeightOp) and v.owner not in place]


def _width(op: PlaitOp) -> tuple[int, int]:
    """Features of the first activation that an op reads, or of what it makes, and bytes of one."""
    read = (v for v in op.operands if isinstance(v.type, TensorType) and not isinstance(v.owner, WeightOp))
    kind = _tensor(next(read, op.results[0]))
    return tensor_bytes(kind) // dtype_bytes(kind.element_type), dtype_bytes(kind.element_type)


def _tensor(value: SSAValue) -> TensorType:
    assert isinstance(value.type, TensorType)
    return value.type
