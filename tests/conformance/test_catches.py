"""The suite itself: a backend that drops or bends one attribute must fail it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.backends.base import Backend, CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.conformance import cases, run_case
from plait.backends.cpu import BACKEND as CPU
from plait.backends.kernels import attention, step, torch_slice
from plait.backends.kernels.torch_eager import experts
from plait.errors import CheckpointError

CASES = {case.name: case for case in cases(("float32",))}


@dataclass
class Bent:
    """The cpu backend, but what it loads was edited: it overlooks something."""

    edit: Callable[[str], str]
    name: str = "bent"

    def capability(self, target: str, module: Any = None) -> Any:
        return CPU.capability(target, module)

    def supports(self, op: Any, target: str) -> Any:
        return CPU.supports(op, target)

    def compile(self, module: Any, target: str, options: CompileOptions) -> CompiledSlice:
        return CPU.compile(module, target, options)

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        file = folder / "slice.mlir"
        text = file.read_text()
        bent = self.edit(text)
        assert bent != text, "the edit changed nothing"
        file.write_text(bent)
        return CPU.load(folder, device, options)


def _set(attribute: str, value: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"\b{attribute} = [-+.e\d]+ : f64", f"{attribute} = {value} : f64", text)


def _drop(attribute: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"(, )?\b{attribute} = [-+.e\d]+ : f64", "", text)


def _without(pattern: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, "", text)


@pytest.mark.parametrize(
    ("edit", "case"),
    [
        (_drop("softcap"), "attention-softcap-pages4"),
        (_drop("softcap"), "attention-window-softcap-pages4"),
        (_set("scale", "2.500000e-01"), "attention-scale-pages4"),
        (_set("eps", "1.000000e-05"), "op-rms_norm-eps"),
        (_set("theta", "1.000100e+04"), "op-rope-linear"),
        (_set("factor", "7.900000e+00"), "op-rope-llama3"),
        (_set("high_freq_factor", "3.900000e+00"), "model-window-and-full"),
        (lambda text: text.replace('"tanh"', '"none"'), "op-gelu_mul-tanh"),
        (lambda text: text.replace('"tanh"', '"none"'), "op-gelu-tanh"),
        (_drop("offset"), "op-rms_norm-offset"),
        (_drop("offset"), "op-add_rms_norm-offset"),
        (_set("factor", "-3.010000e-01"), "op-scale"),
        (_set("attention_factor", "1.000000e+00"), "op-rope-yarn"),
        (_set("attention_factor", "1.440000e+00"), "op-rope-longrope-part"),
        (lambda text: text.replace("truncate = 1", "truncate = 0"), "op-rope-yarn"),
        (lambda text: text.replace("rotary_dim = 8", "rotary_dim = 10"), "op-rope-llama3-part"),
        (_set("scale", "2.510000e-01"), "op-logits-scale"),
        (_drop("softcap"), "op-logits-softcap"),
        (_drop("scale"), "op-router-softmax-bias-normalised"),
        (_drop("normalise"), "op-router-softmax-bias-normalised"),
        (_set("normalise", "0.000000e+00"), "op-router-groups-top2"),
        (_without(r" selection %\d+ : tensor<8xf32>"), "op-router-sigmoid-selection"),
        (_without(r" bias %\d+ : tensor<8xf32>"), "op-router-softmax-bias-normalised"),
        (_without(r", groups = .*?\"max\""), "op-router-groups-max"),
        (lambda text: text.replace('"top2"', '"max"'), "op-router-groups-top2"),
        (_set("alpha", "1.000000e+00"), "op-experts-clamped-biases"),
        (_set("limit", "1.010000e+00"), "op-experts-clamped-biases"),
        (_without(r" biases\(.*?\)"), "op-experts-gelu_tanh-biases"),
        (lambda text: text.replace('"gelu"', '"gelu_tanh"'), "op-experts-gelu"),
        (_set("scale", "2.010000e-01"), "attention-latent-heads6-pages4"),
    ],
)
def test_a_dropped_attribute_fails(edit: Callable[[str], str], case: str, tmp_path: Path) -> None:
    bent = Bent(edit)
    assert isinstance(bent, Backend)
    with pytest.raises(AssertionError, match="is off by"):
        run_case(CASES[case], bent, "cpu", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("zero 8", "zero 7", "quantised-linear-u4-group"),
        (", zero 8", "", "quantised-linear-u4-group"),
        ("block 32x48", "block 40x48", "quantised-linear-e4m3fn-block"),
        ("per row", "per tensor", "quantised-linear-e4m3fn-row"),
        ("f8E4M3FN,", "f8E4M3FNUZ,", "quantised-linear-e4m3fn-tensor"),
    ],
)
def test_a_format_that_is_not_the_stored_one_is_refused(old: str, new: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight-format"):
        run_case(CASES[case], Bent(lambda text: text.replace(old, new)), "cpu", tmp_path)


def test_dropped_sinks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.Attention.__call__

    def call(self: attention.Attention, step: Any, cache: Any, q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return original(self, step, cache, q, k, v)

    monkeypatch.setattr(attention.Attention, "__call__", call)
    for case in ("attention-sinks-pages4", "attention-mqa8-window8-sinks-pages4", "attention-softcap-sinks-pages4"):
        with pytest.raises(AssertionError, match="is off by"):
            run_case(CASES[case], CPU, "cpu", tmp_path / case)


@pytest.mark.parametrize("case", ["attention-window8-pages4", "attention-window1-pages4", "model-window-and-full"])
@pytest.mark.parametrize("method", ["_decodes", "_chunks"])
def test_a_window_of_one_key_more_fails(
    method: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(step.Step, method)

    def wider(self: step.Step, table: Any, lens: Any, window: int | None, dtype: Any) -> Any:
        return original(self, table, lens, None if window is None else window + 1, dtype)

    monkeypatch.setattr(step.Step, method, wider)
    with pytest.raises(AssertionError, match="is off by"):
        run_case(CASES[case], CPU, "cpu", tmp_path)


def test_pages_that_are_not_wiped_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.Cache.append

    def append(self: attention.Cache, paging: step.Paging, k: Any, v: Any) -> Any:
        return original(self, step.Paging(paging.slots, None, paging.parts), k, v)

    monkeypatch.setattr(attention.Cache, "append", append)
    with pytest.raises(AssertionError, match="NaN"):
        run_case(CASES["pages-hold-what-others-left"], CPU, "cpu", tmp_path)


@pytest.mark.parametrize(
    ("wrong", "case", "said"),
    [
        (lambda x, kind: x.float().to(kind), "kv-e4m3fnuz-codes", "holds NaN"),
        (lambda x, kind: x.float().clamp(-240, 240).to(kind), "kv-e4m3fn-codes", "is off by"),
        (lambda x, kind: (x.float() * 0.97).to(kind), "kv-e4m3fn", "is off by"),
    ],
    ids=["too large is NaN", "the other flavour's range", "not the nearest"],
)
def test_codes_that_are_rounded_otherwise_fail(
    wrong: Callable[[Any, Any], Any], case: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "to_codes", lambda values, kind: wrong(values, kind).view(torch.uint8))
    with pytest.raises(AssertionError, match=said):
        run_case(CASES[case], CPU, "cpu", tmp_path)


@pytest.mark.parametrize("case", ["softmax-bias-normalised", "sigmoid-selection", "groups-max", "groups-top2"])
def test_the_last_of_equal_experts_fails(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_largest(values: Any, count: int) -> Any:
        return values.shape[1] - 1 - torch.argsort(values.flip(1), dim=1, descending=True, stable=True)[:, :count]

    monkeypatch.setattr(experts, "first_largest", last_largest)
    with pytest.raises(AssertionError, match="other experts than the first of equals"):
        run_case(CASES[f"op-router-{case}-ties"], CPU, "cpu", tmp_path)


def test_new_tokens_that_are_not_rounded_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.Cache.append

    def append(self: attention.Cache, paging: step.Paging, k: Any, v: Any) -> Any:
        original(self, paging, k, v)
        return k, v

    monkeypatch.setattr(attention.Cache, "append", append)
    with pytest.raises(AssertionError, match="is off by"):
        run_case(CASES["kv-e4m3fn"], CPU, "cpu", tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits: logits.shape[1] - 1 - logits[:, ::-1].argmax(axis=1),
        lambda logits: logits.argmax(axis=1),
        lambda logits: np.nan_to_num(logits, nan=-1.0).argmax(axis=1),
    ],
    ids=["the last of equals", "no number has a place too", "a NaN is overlooked"],
)
def test_tokens_that_are_not_the_best_fail(
    wrong: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_slice, "best_tokens", lambda logits: wrong(logits).astype(np.int32))
    with pytest.raises(AssertionError, match="the best tokens are"):
        run_case(CASES["greedy-ties"], CPU, "cpu", tmp_path)


def test_slices_that_round_differently_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.backends.kernels.torch_slice import TorchSlice

    original = TorchSlice.step

    def rounded(self: TorchSlice, batch: Any, inputs: Any) -> Any:
        return original(self, batch, {name: np.float32(x.astype(np.float16)) for name, x in inputs.items()})

    monkeypatch.setattr(TorchSlice, "step", rounded)
    with pytest.raises(AssertionError, match="slices give other logits"):
        run_case(CASES["slices-equal"], CPU, "cpu", tmp_path)
