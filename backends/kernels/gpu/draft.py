"""A launch plan in the making, and the table of what writes one.

An emitter of `LOWERING` checks its op and returns what appends the op's launches to a `Draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Operation, SSAValue

from plait.backends.base import TOKENS, CompileOptions
from plait.backends.kernels.gpu import arena
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile
from plait.backends.kernels.gpu.launch import (
    ELEMENT_BYTES,
    SIDES,
    TYPES,
    Activation,
    Binary,
    Bounds,
    Choice,
    Fact,
    LaunchPlan,
    Pages,
    Pointer,
    Step,
    Value,
    Weight,
)
from plait.backends.kernels.gpu.table import KERNELS
from plait.backends.kernels.lowering import Lowering, op_name, refuse
from plait.ir import kv_layouts, signature
from plait.ir.ops import AttentionOp, LatentAttentionOp
from plait.ir.ops.base import tensor_type
from plait.ir.types import Tensor, dtype_name

Emit = Callable[["Draft"], None]

LOWERING: Lowering[Emit] = Lowering("the launch plan")

#: The reach of 32-bit offsets.
_SMALL_BYTES = 1 << 31

#: Passes over the head start at multiples of so many rows: their indices, of 4 bytes, at multiples of 16 bytes.
_ROWS = 4


@dataclass(frozen=True)
class View:
    """Rows of `width` adjacent elements, `stride` apart, from `start` elements on in an activation."""

    buffer: str
    type: str
    width: int
    stride: int
    start: int = 0

    def columns(self, start: int, width: int) -> View:
        return replace(self, start=self.start + start, width=width)


@dataclass(frozen=True)
class Place:
    """What a pointer argument gets: a place, or null where a constant makes it unused, and its element type."""

    pointer: Pointer | None
    type: str


Places = Mapping[str, View | Place]
Scalars = Mapping[str, int | float | str]
Constants = Mapping[str, Constant]


@dataclass(frozen=True)
class Need:
    """A kernel that a launch needs, with everything but its tile. `Variant` says what the sets are.

    Attributes:
        scalars: those of the launch.
        most: rows it may have.
    """

    kernel: Kernel
    types: Mapping[str, str]
    constants: Constants
    aligned: frozenset[str]
    small: frozenset[str]
    scalars: Scalars
    most: int

    def binary(self, tile: Tile) -> Binary:
        """As it stands in a plan, before its code is made."""
        return Binary(
            kernel=self.kernel.name,
            types=dict(self.types),
            scalars=dict(self.kernel.scalars),
            constants=dict(self.constants),
            tile=dict(tile.constants),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            aligned=tuple(sorted(self.aligned)),
            small=tuple(sorted(self.small)),
            grid=self.kernel.grid,
        )


Picked = Sequence[tuple[Binary, int | None]]
"""Binaries with the most rows they are for, ascending; None at the end."""

Pick = Callable[[Need], Picked]
"""Chooses how a kernel is compiled. Attention has one binary for any number of rows."""


class Draft:
    """A launch plan in the making. Emitters run in the order of the ops.

    Attributes:
        op: the op whose emitter runs.
        done: ops that a launch before them does already.
        beside: what launches left in another form than the op's result.
    """

    def __init__(self, module: ModuleOp, target: str, arch: Arch, options: CompileOptions, pick: Pick) -> None:
        self.op: Operation
        self.done: set[Operation] = set()
        self.beside: dict[SSAValue, tuple[View, View]] = {}
        self.arch = arch
        self._target, self._pick = target, pick
        rows = min(options.max_sequences, options.max_step_tokens)
        self._bounds = Bounds(
            options.max_step_tokens, options.max_sequences, -(-rows // _ROWS) * _ROWS, options.page_tokens
        )
        self._signature = signature(module)
        self._layouts = kv_layouts(module, options.page_tokens)
        self._pages = {
            f"{side}{i}": Pages(i, side)
            for i, layout in enumerate(self._layouts)
            for side in SIDES
            if side == "k" or layout.v_head_dim
        }
        self._binaries: list[Binary] = []
        self._weights: dict[str, Weight] = {}
        self._facts: dict[str, Fact] = {}
        self._activations: dict[str, tuple[str, int, str]] = {}
        self._steps: list[Step] = []
        self._head: list[Step] = []
        self._values: dict[SSAValue, View] = {}
        self._best: dict[str, View] = {}
        for argument in self._signature.inputs.values():
            self.make(argument)

    @property
    def page_tokens(self) -> int:
        return self._bounds.page_tokens

    def view(self, value: SSAValue) -> View:
        return self._values[value]

    def knows(self, value: SSAValue) -> bool:
        """Whether a launch so far makes it."""
        return value in self._values

    def make(self, value: SSAValue, rows: str = "T") -> View:
        """A new activation for a result."""
        view = self.activation(width_of(value), type_of(value), rows)
        self.set(value, view)
        return view

    def set(self, value: SSAValue, view: View) -> None:
        """Say where a result lies."""
        self._values[value] = view

    def activation(self, width: int, type: str, rows: str = "T") -> View:
        name = f"a{len(self._activations)}"
        self._activations[name] = (rows, width, type)
        return View(name, type, width, width)

    def best(self) -> View:
        """A new activation for the best token of each row of logits, which comes out in their place in greedy steps."""
        self._best[TOKENS] = self.activation(1, "i32", "R")
        return self._best[TOKENS]

    def weight(self, weight: Weight) -> Place:
        return Place(Pointer(_named(self._weights, weight, "w")), weight.type)

    def fact(self, fact: Fact) -> Place:
        return Place(Pointer(_named(self._facts, fact, fact.kind)), fact.type)

    def pages(self, op: AttentionOp | LatentAttentionOp) -> tuple[Place, Place]:
        """Of K and of V; a latent attention has no V."""
        layer = [*self._signature.kv.values()].index(op.kv)  # type: ignore[arg-type]
        kind = pages_type(op, self.arch)
        return Place(Pointer(f"k{layer}"), kind), Place(Pointer(f"v{layer}"), kind)

    def launch(
        self,
        name: str,
        pointers: Places,
        scalars: Scalars,
        constants: Constants,
        *,
        rows: str = "T",
        names: Mapping[str, str] | None = None,
        when: str = "1",
    ) -> None:
        """Append a launch. Arguments that the kernel does not have are left out."""
        kernel = KERNELS[name]
        picked = self.pick(name, pointers, scalars, constants, rows)
        where = self._head if rows == "R" else self._steps
        where.append(
            Step(
                op=op_name(self.op),
                rows=rows,
                choices=tuple(Choice(self._index(binary), most) for binary, most in picked),
                pointers={key: _place(pointers[key]).pointer for key in kernel.pointers},
                scalars={key: scalars[key] for key in kernel.scalars},
                names=dict(names or {}),
                when=when,
            )
        )

    def pick(self, name: str, pointers: Places, scalars: Scalars, constants: Constants, rows: str = "T") -> Picked:
        """The binaries that a launch with these arguments chooses from."""
        kernel = KERNELS[name]
        places = {key: _place(pointers[key]) for key in kernel.pointers}
        given = {key: scalars[key] for key in kernel.scalars}
        aligned = {key for key, place in places.items() if place.pointer is None or place.pointer.offset % 16 == 0}
        aligned |= {key for key, kind in kernel.scalars.items() if kind == "i32" and _sixteens(given[key])}
        return self._pick(
            Need(
                kernel,
                {key: place.type for key, place in places.items()},
                {key: constants[key] for key in kernel.constants},
                frozenset(aligned),
                frozenset(key for key, place in places.items() if self._is_small(place.pointer)),
                given,
                self._bounds.symbols[rows],
            )
        )

    def finish(self) -> LaunchPlan:
        steps = (*self._steps, *self._head)
        activations, nbytes = arena.pack(self._lives(steps), self._bounds.symbols)
        return LaunchPlan(
            target=self._target,
            arch=self.arch.name,
            bounds=self._bounds,
            binaries=tuple(self._binaries),
            weights=self._weights,
            kv=self._layouts,
            pages=self._pages,
            facts=self._facts,
            arena_bytes=nbytes,
            activations=activations,
            inputs={name: self._boundary(value) for name, value in self._signature.inputs.items()},
            outputs={
                **{name: self._boundary(value) for name, value in self._signature.outputs.items()},
                **{name: Value(view.buffer, "int32", "R", 1, 0, 1, "G") for name, view in self._best.items()},
            },
            steps=steps,
            head=len(self._steps),
        )

    def _is_small(self, pointer: Pointer | None) -> bool:
        """Whether what it leads to ends within 2 GiB, whatever the batch. Pages are as many as there is room."""
        name = "" if pointer is None else pointer.buffer
        if name in self._activations:
            rows, width, kind = self._activations[name]
            return evaluate(rows, self._bounds.symbols) * width * ELEMENT_BYTES[kind] < _SMALL_BYTES
        if name in self._weights:
            return self._weights[name].nbytes < _SMALL_BYTES
        return name not in self._pages

    def _index(self, binary: Binary) -> int:
        """Equal binaries are one."""
        if binary not in self._binaries:
            self._binaries.append(binary)
        return self._binaries.index(binary)

    def _boundary(self, value: SSAValue) -> Value:
        view, dtype = self._values[value], dtype_name(tensor_of(value).element_type)
        rows: Literal["T", "R"] = "R" if self._activations[view.buffer][0] == "R" else "T"
        return Value(view.buffer, dtype, rows, view.width, view.start, view.stride, "1 - G" if rows == "R" else "1")

    def _lives(self, steps: Sequence[Step]) -> dict[str, Activation]:
        """Every activation with the first and the last step that needs it."""
        uses: dict[str, list[int]] = {name: [] for name in self._activations}
        for argument in self._signature.inputs.values():
            uses[self._values[argument].buffer].append(-1)
        for index, step in enumerate(steps):
            for pointer in step.pointers.values():
                if pointer is not None and pointer.buffer in uses:
                    uses[pointer.buffer].append(index)
        for view in (*(self._values[value] for value in self._signature.outputs.values()), *self._best.values()):
            uses[view.buffer].append(len(steps))
        made = {}
        for name, (rows, width, kind) in self._activations.items():
            first, last = min(uses[name]), max(uses[name])
            if first < len(self._steps) <= last:  # the head may run again, and reads it again
                last = len(steps)
            made[name] = Activation(rows, width, kind, first, last)
        return made


def pages_type(op: AttentionOp | LatentAttentionOp, arch: Arch) -> str:
    """The type of an attention's pages: e4m3fn is converted by the kernels where the architecture does not.

    Raises UnsupportedError for another FP8 that the architecture does not have.
    """
    kind = kernel_type(op.cache.dtype)
    if not op.cache.is_fp8 or kind in arch.fp8:
        return kind
    if kind == TYPES["e4m3fn"]:
        return "u8"
    raise refuse(op, "KV dtype", op.cache.dtype, f"{arch.name} does not have it; e4m3fn is on every architecture")


def null(type_: str) -> Place:
    """A pointer that a constant makes unused."""
    return Place(None, type_)


def tensor_of(value: SSAValue) -> Tensor:
    return tensor_type(value, "the value", len(value.type.get_shape()))  # type: ignore[attr-defined]


def width_of(value: SSAValue) -> int:
    return tensor_of(value).get_shape()[1]


def type_of(value: SSAValue) -> str:
    """The element type as kernels call it."""
    return kernel_type(tensor_of(value).element_type)


def kernel_type(kind: Attribute) -> str:
    return TYPES[dtype_name(kind)]


def user(value: SSAValue) -> Operation | None:
    """The one op that uses a value, where there is one."""
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


def _place(argument: View | Place) -> Place:
    if isinstance(argument, Place):
        return argument
    return Place(Pointer(argument.buffer, argument.start * ELEMENT_BYTES[argument.type]), argument.type)


def _sixteens(value: float | str) -> bool:
    return isinstance(value, int) and value % 16 == 0


def _named(known: dict[str, Weight] | dict[str, Fact], item: Weight | Fact, prefix: str) -> str:
    """The name of an equal item, or a new one."""
    for name, other in known.items():
        if other == item:
            return name
    known[f"{prefix}{len(known)}"] = item  # type: ignore[assignment]
    return f"{prefix}{len(known) - 1}"
