"""Checkpoints that are programs: they bring their own module, and no family builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from xdsl.dialects.builtin import ModuleOp


class OwnModule(Protocol):
    """The config of such a checkpoint; it answers to the names that `DecoderConfig` has, and builds the module."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def note(self) -> str | None:
        """What a user should know of the plan."""

    def build(self, dtype: str) -> ModuleOp:
        """The module of the whole model. Raises UnsupportedError, naming what has no meaning here."""

    def unused(self) -> dict[str, str]:
        """Tensors of the file that no op uses, with the reason."""


@dataclass(frozen=True)
class GraphConfig:
    """What is known of a graph that is made of plait's ops; it answers to the names that `DecoderConfig` has.

    Attributes:
        ropes: kind and theta of each rope, as they were read back from its tables.
        notes: what a user should know of the plan.
    """

    family: str
    file: str
    vocab_size: int
    blocks: int
    max_positions: int
    ropes: tuple[str, ...]
    dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        return "; ".join(self.notes) or None
