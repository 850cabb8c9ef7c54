"""What an op costs in one step: flops and bytes, as functions of the step's lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """The lengths of one batch: new tokens per sequence, KV tokens per sequence after the step, rows of logits."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    logit_rows: int

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @staticmethod
    def prefill(tokens: int) -> Step:
        """One request's whole prompt in one step."""
        return Step((tokens,), (tokens,), 1)

    @staticmethod
    def decode(sequences: int, kv_tokens: int) -> Step:
        """One token of each of `sequences` requests that hold `kv_tokens` each (the new one counted)."""
        return Step((1,) * sequences, (kv_tokens,) * sequences, sequences)


@dataclass(frozen=True)
class Cost:
    """Floating-point operations (a multiply-add is two) and the bytes that must move at least once."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_bytes + other.kv_bytes,
        )


def visible_pairs(query_len: int, kv_len: int, window: int | None) -> int:
    """(query, key) pairs of one sequence under a causal mask: key j <= query i, and i - j < window where given.

    Query i stands at position kv_len - query_len + i and sees min(position + 1, window) keys.
    """
    first, last = kv_len - query_len + 1, kv_len
    if window is None or last <= window:
        return (first + last) * query_len // 2
    if first >= window:
        return window * query_len
    growing = window - first
    return (first + window - 1) * growing // 2 + window * (query_len - growing)
