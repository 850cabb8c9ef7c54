"""Checkpoints that are programs: they bring their own module, and no family builds it."""

from __future__ import annotations

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
