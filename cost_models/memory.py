"""What a slice needs on its device: weights, KV for the workload, activations, logits, reserve; from its own tensors.

- weights: the embedding on the first slice, norm and head on the last; a tensor that two slices use (a tied embedding)
  counts on both, one that two units of the same slice use counts once. Quantised ones count as they are stored where
  the device computes with them so (`keeps_quantised`), and in the model's dtype where they are dequantised on loading.
- KV: per attention, whole pages: every token, or the ring of its window.
- activations: what stands at once in a full step (`activations.py`), on the host as torch allocates it; elsewhere the
  largest unit's results and the incoming boundary, an upper bound: reuse is not counted on.
- logits: float32 scores, one row per request, on the last slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from xdsl.ir import Attribute

from plait.cost_models.activations import HOST, gathered_tokens, peak
from plait.cost_models.profile import FP8_BYTES, KVFacts, ModelProfile, UnitFacts
from plait.cost_models.tables import Floats, slice_maxima, slice_sums
from plait.ir.types import DTYPES, QuantType, dtype_bytes
from plait.spec import Device, MemoryEstimate, Workload

#: The fewest columns with one scale: of whole numbers, and of FP8.
_LEAST_GROUP, _LEAST_FP8_GROUP = 16, 32

#: Ops that multiply by a matrix, and by one of a stack. A GPU reads the weights of any other op as numbers.
_PRODUCTS = frozenset({"plait.linear", "plait.logits"})
_STACKS = frozenset({"plait.experts"})

#: Codes that every GPU multiplies, those that it multiplies in a stack, and those of FP8, which some do.
_PRODUCT_CODES, _STACK_CODES, _FP8 = ("i8", "u4"), ("i8", "u4", "e2m1"), "e4m3fn"


def keeps_quantised(device: Device, kind: Attribute, readers: frozenset[str] = _PRODUCTS) -> bool:
    """Whether a quantised weight is held as it is stored, where ops of these names read it: codes of 8 and 4 bits
    without a minimum by a GPU, FP8 by one that multiplies it, MXFP4 in stacks of experts. What is left is dequantised
    when it is loaded. tests/host/test_held.py holds this against the kernels' own plans."""
    stacked = readers <= _STACKS
    if (
        device.backend not in ("cuda", "rocm")
        or not isinstance(kind, QuantType)
        or not (stacked or readers <= _PRODUCTS)
    ):
        return False
    if kind.minimum_dtype is not None or kind.has_outer or kind.is_ordered:
        return False
    group = kind.block[1]
    power = group == 0 or (group >= _LEAST_GROUP and group & (group - 1) == 0)
    if kind.code_name == _FP8:
        return "fp8" in device.peak_flops_per_s and not group % _LEAST_FP8_GROUP and (power or not stacked)
    return power and kind.code_name in (_STACK_CODES if stacked else _PRODUCT_CODES)


def capacity_bytes(device: Device) -> int:
    return device.memory_bytes if device.free_bytes is None else device.free_bytes


@dataclass(frozen=True)
class MemoryModel:
    """Memory of every slice of a model under a workload; the device brings capacity and reserve.

    `held`: device id -> the model as it is quantised for that device; the others hold `profile`.
    """

    profile: ModelProfile
    workload: Workload
    page_tokens: int
    max_step_tokens: int
    held: Mapping[str, ModelProfile] = field(default_factory=dict)

    @cached_property
    def weights(self) -> Floats:
        """[start, end) -> bytes, as they are stored."""
        return _each_once([unit.weights for unit in self.profile.units])

    def weights_on(self, device: Device) -> Floats:
        """[start, end) -> bytes on a device, in the model's dtype where it does not keep them as they are stored."""
        model = self.held.get(device.id, self.profile)
        wide = [
            [(own.name, own.more_bytes) for own in unit.quantised if not keeps_quantised(device, own.kind, own.readers)]
            for unit in model.units
        ]
        stored = self.weights if model is self.profile else _each_once([unit.weights for unit in model.units])
        return stored + _each_once(wide) if any(wide) else stored

    @cached_property
    def kv(self) -> Floats:
        """[start, end) -> bytes for the workload's requests at their full length."""
        return np.asarray(self.workload.concurrency * slice_sums(self._request_kv(self.workload.context_tokens)))

    def activations_on(self, device: Device) -> Floats:
        """[start, end) -> bytes of a full step: its peak where the kernels of the device are known."""
        if device.backend != "cpu" or (known := self._host_peaks) is None:
            return self.activations
        return known

    @cached_property
    def _host_peaks(self) -> Floats | None:
        """The most of any unit, on the host; None where it holds an op that is not known there."""
        facts = {unit.facts for unit in self.profile.units}
        peaks = {item: self._host_peak(item, self.workload.concurrency, self.workload.context_tokens) for item in facts}
        found = [peaks[unit.facts] for unit in self.profile.units]
        return None if None in found else slice_maxima([float(size or 0) for size in found])

    def _host_peak(self, facts: UnitFacts, requests: int, tokens: int) -> int | None:
        """Of one unit, where so many requests hold so many tokens each."""
        wide = dtype_bytes(DTYPES[self.profile.dtype])

        def copied(kv: KVFacts) -> int:
            """What decode steps copy out of the pages of one layer: whole pages of every request, FP8 as numbers."""
            seen = tokens if kv.window is None else min(tokens, kv.window + self.page_tokens)
            of_token = kv.sides * kv.kv_heads * kv.head_dim * (wide + FP8_BYTES if kv.is_fp8 else wide)
            return requests * gathered_tokens(seen, self.page_tokens) * of_token

        return peak(facts.held, HOST, self.max_step_tokens, max(map(copied, facts.kv), default=0))

    @cached_property
    def activations(self) -> Floats:
        """[start, end) -> bytes that no step needs more of: all results of the largest unit, and what comes in."""
        incoming = np.array([0, *self.profile.boundary_bytes_per_token, 0], dtype=float)
        largest = slice_maxima([unit.facts.activation_bytes_per_token for unit in self.profile.units])
        return np.asarray(np.triu(largest + incoming[:, None], k=1) * self.max_step_tokens)

    @cached_property
    def logits(self) -> Floats:
        out = np.zeros_like(self.weights)
        out[:-1, -1] = self.workload.concurrency * self.profile.logits_bytes_per_row
        return out

    def fixed(self, device: Device) -> Floats:
        """Everything but KV and the device's reserve."""
        return self.weights_on(device) + self.activations_on(device) + self.logits

    @cached_property
    def full_page(self) -> Floats:
        """[start, end) -> bytes of one more page of one request, over the layers that keep every token."""
        return self.page_tokens * slice_sums(
            [sum(kv.bytes_per_token for kv in unit.facts.kv if kv.window is None) for unit in self.profile.units]
        )

    @cached_property
    def window_kv(self) -> Floats:
        """The part of `kv` that lies in rings: it does not grow with the context."""
        return self.workload.concurrency * slice_sums(self._request_kv(self.workload.context_tokens, full=False))

    def needed(self, device: Device) -> Floats:
        """[start, end) -> bytes on a device, its reserve included."""
        return np.asarray(self.fixed(device) + self.kv + device.reserve_bytes)

    def kv_tokens(self, device: Device) -> Floats:
        """[start, end) -> KV tokens that fit beside the rest, whole pages, over all requests; inf where no layer grows.

        Rings are counted for the workload's requests, whatever the tokens.
        """
        room = capacity_bytes(device) - device.reserve_bytes - self.fixed(device) - self.window_kv
        with np.errstate(divide="ignore", invalid="ignore"):
            pages = np.floor(room / self.full_page)
        pages = np.where(self.full_page > 0, pages, np.inf)
        return np.asarray(pages * self.page_tokens)

    def estimate(self, start: int, end: int, device: Device) -> MemoryEstimate:
        """One slice on one device, needed or not."""
        at = (start, end)
        return MemoryEstimate(
            weights_bytes=int(self.weights_on(device)[at]),
            kv_bytes=int(self.kv[at]),
            activations_bytes=int(self.activations_on(device)[at]),
            logits_bytes=int(self.logits[at]),
            reserve_bytes=device.reserve_bytes,
            capacity_bytes=capacity_bytes(device),
        )

    def _room(self, start: int, end: int, device: Device) -> Callable[[int, int], bool]:
        """Whether a slice fits with so many requests of so many tokens each."""
        at = (start, end)
        room = capacity_bytes(device) - device.reserve_bytes - int(self.weights_on(device)[at])
        row = int(self.logits[at]) // self.workload.concurrency
        own = self.profile.units[start + (start > 0) : end + 1 + (end == len(self.profile.blocks))]
        kinds = {unit.facts for unit in own}
        grows = device.backend == "cpu" and self._host_peaks is not None
        kvs = [kv for unit in own for kv in unit.facts.kv]

        def fits(requests: int, tokens: int) -> bool:
            each = sum(
                kv.pages(tokens, self.page_tokens, self.max_step_tokens) * kv.bytes_per_token * self.page_tokens
                for kv in kvs
            )
            live = int(self.activations_on(device)[at])
            if grows:
                live = max(self._host_peak(facts, requests, tokens) or 0 for facts in kinds)
            return requests * (each + row) + live <= room

        return fits

    def max_context_tokens(self, start: int, end: int, device: Device) -> int | None:
        """The largest context, in whole pages, that all the workload's requests can have at once; None where no layer
        grows and the slice fits: it does not limit the context. One page more does not fit."""
        fits, requests = self._room(start, end, device), self.workload.concurrency
        kvs = [kv for unit in self.profile.blocks[start:end] for kv in unit.facts.kv]
        if all(kv.window is not None for kv in kvs):
            longest = max((kv.window or 0 for kv in kvs), default=0) + 2 * (self.max_step_tokens + self.page_tokens)
            if fits(requests, -(-longest // self.page_tokens) * self.page_tokens):
                return None
        return _most(lambda pages: fits(requests, pages * self.page_tokens)) * self.page_tokens

    def max_requests(self, start: int, end: int, device: Device) -> int | None:
        """The most requests that can hold the workload's context at once; None where a request takes nothing here. One
        more does not fit."""
        if not self.kv[start, end] and not self.logits[start, end]:
            return None
        fits = self._room(start, end, device)
        return _most(lambda requests: fits(requests, self.workload.context_tokens))

    def _request_kv(self, tokens: int, *, full: bool = True) -> list[float]:
        """Bytes of one request's KV in every unit; only the rings where `full` is off."""

        def held(facts: UnitFacts) -> float:
            return float(
                sum(
                    kv.pages(tokens, self.page_tokens, self.max_step_tokens) * self.page_tokens * kv.bytes_per_token
                    for kv in facts.kv
                    if full or kv.window is not None
                )
            )

        by_kind = {facts: held(facts) for facts in {unit.facts for unit in self.profile.units}}
        return [by_kind[unit.facts] for unit in self.profile.units]


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number from 0 on that fits; 0 where none does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _each_once(units: Sequence[Sequence[tuple[str, int]]]) -> Floats:
    """[start, end) -> bytes of named tensors, each of which counts once however many units of the range name it."""
    total = slice_sums([sum(size for _, size in unit) for unit in units])
    users: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        for weight in unit:
            users[weight].append(index)
    for (_, size), indices in users.items():
        if len(indices) > 1:
            count = slice_sums(np.isin(np.arange(len(units)), indices).astype(float))
            total -= size * np.maximum(count - 1, 0)
    return total
