"""The ops that a graph is raised to, in order, before it is known which block each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.frontend.graph.refusal import refuse
from plait.ir import Builder
from plait.words import counted

Emit = Callable[..., SSAValue]
"""`emit(builder, *operands)`."""

Kind = Literal["attention", "add", "other"]


@dataclass(frozen=True)
class Step:
    """One op: what it takes (earlier steps by number), and how it is built."""

    emit: Emit
    operands: tuple[int, ...]
    kind: Kind


class Tape:
    """Append steps; then `build`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, emit: Emit, operands: Sequence[int] = (), kind: Kind = "other") -> int:
        """The number of the new step."""
        self.steps.append(Step(emit, tuple(operands), kind))
        return len(self.steps) - 1

    def build(self, model: str, dtype: str, result: int) -> ModuleOp:
        """The module whose logits are step `result`.

        Raises:
            UnsupportedError: `graph-unused`, `graph-blocks`.
        """
        blocks = self._blocks(result)
        builder = Builder(model, dtype)
        made: list[SSAValue] = []
        for step, block in zip(self.steps, blocks, strict=True):
            builder.block = block
            made.append(step.emit(builder, *[made[operand] for operand in step.operands]))
        return builder.finish({"logits": made[result]})

    def _blocks(self, result: int) -> list[int | None]:
        """The block of each step. A block has one attention; it begins behind the last step before its attention of
        which all that follows is made: the residual stream. The last block ends with the last residual add."""
        streams = self._streams(result)
        attentions = [at for at, step in enumerate(self.steps) if step.kind == "attention"]
        starts: list[int] = []
        for at in attentions:
            before = [stream for stream in streams if stream < at]
            if not before or (starts and before[-1] < starts[-1]):
                refuse("blocks", f"no single tensor stands between attention {len(starts) - 1} and {len(starts)}")
            starts.append(before[-1] + 1)
        ends = [s for s in streams if attentions and s > attentions[-1] and self.steps[s].kind == "add"]
        if not ends:
            refuse(
                "blocks", "the graph has no residual add behind an attention", "no transformer layers are to be seen"
            )
        return [
            None if at < starts[0] or at > ends[-1] else sum(start <= at for start in starts) - 1
            for at in range(len(self.steps))
        ]

    def _streams(self, result: int) -> list[int]:
        """The steps behind which nothing but their own result is used."""
        last_use = {result: len(self.steps)}
        for at, step in enumerate(self.steps):
            last_use |= dict.fromkeys(step.operands, at)
        if unused := [at for at in range(len(self.steps)) if at not in last_use]:
            refuse(
                "unused", f"nothing uses {counted(len(unused), 'result')} of the graph", "this is our fault: report it"
            )
        reach, streams = -1, []
        for at in range(len(self.steps)):
            if reach <= at:
                streams.append(at)
            reach = max(reach, last_use[at])
        return streams
