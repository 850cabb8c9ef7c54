"""Where activations lie: buffers that are never alive together share bytes of one arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.launch import ALIGNMENT, ELEMENT_BYTES, Activation


def size_bytes(buffer: Activation, symbols: Mapping[str, int]) -> int:
    """What the buffer takes for a batch."""
    return evaluate(buffer.rows, symbols) * buffer.width * ELEMENT_BYTES[buffer.type]


def pack(buffers: Mapping[str, Activation], symbols: Mapping[str, int]) -> tuple[dict[str, Activation], int]:
    """Give every buffer its offset, for batches up to `symbols`.

    The largest buffer goes first, each as low as those it is alive with allow: first fit, decreasing size.

    Returns:
        The buffers in the order they came, and the bytes of the arena.
    """
    placed: dict[str, Activation] = {}
    sized = {name: replace(buffer, nbytes=size_bytes(buffer, symbols)) for name, buffer in buffers.items()}
    for name, buffer in sorted(sized.items(), key=lambda item: -item[1].nbytes):
        offset = 0
        for other in sorted(placed.values(), key=lambda other: other.offset):
            if together(buffer, other):
                if offset + buffer.nbytes <= other.offset:
                    break
                offset = max(offset, -(-(other.offset + other.nbytes) // ALIGNMENT) * ALIGNMENT)
        placed[name] = replace(buffer, offset=offset)
    end = max((buffer.offset + buffer.nbytes for buffer in placed.values()), default=0)
    return {name: placed[name] for name in buffers}, end


def together(a: Activation, b: Activation) -> bool:
    """Whether both hold something during some step."""
    return a.first <= b.last and b.first <= a.last
