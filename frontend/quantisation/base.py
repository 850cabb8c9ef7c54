"""What every method of quantisation brings: what its config says, and how its tensors make a weight."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.files import some, unreadable
from plait.ir.numbers import NUMPY
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

FLOATS: tuple[Encoding, ...] = ("float32", "float16", "bfloat16")
Block = tuple[int, int]

UNQUANTISED = "plait does not quantise activations"
ACTIVATION_SCALES = {
    rf".+\.{name}": f"of quantised activations; {UNQUANTISED}"
    for name in ("input_scale", "input_zero_point", "input_global_scale")
}
"""Tensors that a checkpoint with static activation scales holds beside its weights, with the reason they are unused."""


@dataclass(frozen=True)
class Quantisation(ABC):
    """What a config says of quantised weights. One class for each method.

    Attributes:
        CODES: what follows a module's name in the name of the tensor that holds its codes.
        STORED: what codes are stored as. A tensor called so and stored otherwise is not quantised.
        WEIGHT: what follows the module's name in the name of the weight they make.
        EXPERTS_ALONE: only stacks of experts are quantised.
        READ: patterns of tensors that are read when the checkpoint is opened and say nothing more, with the reason.
        skipped: modules that are not quantised: names, with all below them, where `*` is anything, or `re:` and a
            regular expression.
        static: there are scales of activations too.
    """

    METHOD: ClassVar[str]
    CODES: ClassVar[str] = ".weight"
    STORED: ClassVar[tuple[Encoding, ...]]
    WEIGHT: ClassVar[str] = ".weight"
    EXPERTS_ALONE: ClassVar[bool] = False
    READ: ClassVar[Mapping[str, str]] = {}

    skipped: tuple[str, ...] = ()
    static: bool = False

    @abstractmethod
    def kind(self) -> QuantType:
        """The element type of a quantised weight, as far as the config says it; a scale's dtype is float32 otherwise,
        the largest."""

    @abstractmethod
    def join(self, parts: Parts) -> WeightRef:
        """The weight that the tensors of one module make.

        Raises:
            CheckpointError, UnsupportedError: a tensor is missing, or does not fit, by name.
        """

    @property
    def codes(self) -> str:
        return self.CODES

    @property
    def stored(self) -> tuple[Encoding, ...]:
        return self.STORED

    @property
    def harmless(self) -> Mapping[str, str]:
        """Patterns of tensors that stand beside the weights and are not needed, with the reason."""
        return {**self.READ, **(ACTIVATION_SCALES if self.static else {})}

    def skips(self, module: str) -> bool:
        """Whether `model.layers.0.mlp.up_proj` is listed as not quantised."""
        return any(_matches(name, module) for name in self.skipped)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return any(re.fullmatch(translate(text), module) is not None for text in (pattern, f"{pattern}.*"))
    return module == pattern or module.startswith(f"{pattern}.")


class Parts:
    """The tensors of one quantised module, found one by one.

    Args:
        module: `model.layers.0.mlp.up_proj`.
        codes: the tensor of codes.
        tensors: all tensors of the checkpoint.
    """

    def __init__(self, module: str, codes: WeightRef, tensors: Mapping[str, WeightRef], source: Path) -> None:
        self.module, self.codes, self.source = module, codes, source
        self._tensors = tensors

    def find(self, suffix: str) -> WeightRef | None:
        """The tensor whose name is the module's with this behind it."""
        return self._tensors.get(f"{self.module}{suffix}")

    def need(self, *suffixes: str) -> WeightRef:
        """The one that is there of these."""
        found = [part for part in map(self.find, suffixes) if part is not None]
        if len(found) != 1:
            names = [repr(f"{self.module}{suffix}") for suffix in suffixes]
            raise CheckpointError(
                "scale-missing" if not found else "quantisation-conflict",
                f"{self.source}: {self.codes.name!r} holds {self.codes.encoding} codes and has "
                + ("no scale" if not found else "two scales"),
                why=f"looked for {' and '.join(names)}",
                hint="" if found else "fetch the whole checkpoint again",
            )
        return found[0]

    def check(
        self, part: WeightRef, shapes: Sequence[tuple[int, ...]], encodings: Sequence[Encoding], what: str
    ) -> None:
        """Refuse a tensor of another shape or dtype than `what` has."""
        if part.shape not in shapes or part.encoding not in encodings:
            raise CheckpointError(
                "scale-shape",
                f"{self.source}: {part.name!r} is {part.encoding} of {list(part.shape)}",
                why=f"{what} is {list(shapes[0])} of {' or '.join(encodings)}",
                hint="does the config belong to these weights?",
            )

    def scale(
        self, part: WeightRef, kind: QuantType, shape: tuple[int, ...], stored: Sequence[Encoding] = FLOATS
    ) -> None:
        """Refuse a scale that does not fit a weight of `shape`."""
        rows, columns = kind.scale_shape(shape)
        shapes: dict[Block, list[tuple[int, ...]]] = {(0, 0): [(), (1,), (1, 1)], (1, 0): [(rows, 1), (rows,)]}
        what = f"the scale of {list(shape)}, {layout(kind.block)},"
        self.check(part, shapes.get(kind.block, [(rows, columns)]), stored, what)

    def refuse(self, why: str) -> UnsupportedError:
        """Codes of a shape or a dtype that is not implemented."""
        codes = self.codes
        return UnsupportedError(
            "dtype-unsupported", f"{self.source}: {codes.name!r} is {codes.encoding} of {list(codes.shape)}", why=why
        )

    def conflict(self, part: WeightRef, what: str, why: str) -> CheckpointError:
        return CheckpointError("quantisation-conflict", f"{self.source}: {part.name!r} {what}", why=why)

    def matrix(self, per_element: int = 1) -> tuple[int, int]:
        """The shape of codes that are a matrix, with so many codes in each stored element."""
        if len(self.codes.shape) != 2:
            raise self.refuse("only a matrix is quantised so")
        rows, columns = self.codes.shape
        return rows, columns * per_element

    def fits(self, kind: QuantType, shape: tuple[int, ...]) -> None:
        """Refuse a weight that the element type does not fit."""
        problem = kind.problem(shape)
        if problem:
            raise self.refuse(problem)

    def read(self, part: WeightRef) -> NDArray[Any]:
        """The numbers of a small tensor: an order of columns, a shape, a state."""
        dtype = NUMPY[part.encoding]
        try:
            data = np.fromfile(part.file, dtype, count=prod(part.shape), offset=part.offset)
        except OSError as err:
            raise unreadable(Path(part.file), err) from err
        return data.reshape(part.shape)


def layout(block: Block) -> str:
    """A layout of scales in words."""
    words = {(0, 0): "one for the tensor", (1, 0): "one for each row"}
    return words.get(block, f"one for each block of {block[0]} x {block[1]}")


def names(reader: ConfigReader, *keys: str) -> tuple[str, ...]:
    """A list of modules, under one key or under several that say the same; empty where all are absent or null.

    Raises:
        CheckpointError: `config-type`, `config-value`; `config-conflict`: two keys list other modules.
    """
    lists = {key: _names(reader, key) for key in keys if reader.raw(key) is not None}
    if len({frozenset(found) for found in lists.values()}) > 1:
        listed = (f"{key!r} lists {some(found) or 'none'}" for key, found in lists.items())
        raise reader.error(
            "config-conflict", " and ".join(listed), why="both say which modules are not quantised, and neither wins"
        )
    return next(iter(lists.values()), ())


def _names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    value = reader.raw(key)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise reader.error("config-type", f"{key!r} is {value!r:.100}, expected a list of module names")
    for name in value:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except (re.error, RecursionError, OverflowError) as err:
                raise reader.error("config-value", f"{key!r} holds {name!r:.100}", why=str(err)) from err
    return tuple(value)


def block_of(reader: ConfigReader, key: str, value: Any) -> Block:
    """[rows, columns] of a config."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not whole:
        raise reader.error("config-value", f"{key!r} is {value!r:.100}, expected [rows, columns]")
    return value[0], value[1]


def group_of(reader: ConfigReader, key: str = "group_size") -> Block:
    """A group of neighbours in a row; -1 is the whole row."""
    size = reader.get(key, int)
    if size != -1 and size < 1:
        raise reader.error("config-value", f"{key!r} is {size}, expected a positive number, or -1 for whole rows")
    return (1, 0) if size == -1 else (1, size)


def refuse(reader: ConfigReader, key: str, value: Any, allowed: Sequence[Any]) -> UnsupportedError:
    """A value of a key that is not implemented."""
    return UnsupportedError(
        "config-value",
        f"{reader.source}: {key!r} is {value!r:.100}, which is not implemented",
        why=f"implemented: {some(map(str, allowed))}",
    )
