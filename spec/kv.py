"""KV cache layouts and classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KVLayout:
    """How a backend stores the pages of one layer.

    Order `NHD` is (page, token, kv_head, head_dim), `HND` is (page, kv_head, token, head_dim); K and V are two arrays.
    With `values` n there is K alone, and the first n features of a key are its value: V is empty, (..., 0).
    """

    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    order: Literal["NHD", "HND"] = "NHD"
    window: int | None = None
    values: int | None = None

    @property
    def v_head_dim(self) -> int:
        """Features of a head in V as it is stored."""
        return self.head_dim if self.values is None else 0


def kv_class(window: int | None) -> str:
    """Layers of one KV class share page tables: `full`, or `window4096`.

    A full layer keeps every token. A window layer keeps a ring of pages: its table repeats physical pages, and a key
    older than the window is overwritten. A backend reads pages only through the table and only inside the window, so it
    need not know which of the two it serves.
    """
    return "full" if window is None else f"window{window}"


def ring_pages(window: int, page_tokens: int, max_step_tokens: int) -> int:
    """Pages one sequence needs in a window class: the window before the first new token plus the tokens of one step.

    A step writes its up to `max_step_tokens` tokens before any of them attends, so the keys of
    `window - 1 + max_step_tokens` consecutive positions must be alive at once. Position p lies in slot
    `p % (pages * page_tokens)` of the ring, so that many slots suffice wherever the run begins.
    """
    return -(-(window - 1 + max_step_tokens) // page_tokens)
