"""Every backend of this repository on every conformance case, as it runs on this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends.conformance import Case, cases, families, run_case
from plait.backends.conformance.models import QUANTISED
from plait.backends.conformance.suite import family_checks
from plait.registry import IN_TREE, load_backend

TARGETS = {
    "cpu": "cpu",
    "cuda": "cuda:sm_90a",
    "rocm": "rocm:gfx942",
    "xla": "xla:tpu-v5e",
    "null": "null:h100",
}


def test_every_backend_is_held_to_the_suite() -> None:
    assert set(TARGETS) == set(IN_TREE)


def test_the_host_refuses_nothing() -> None:
    """Cases of what a backend need not have pass where it is refused; on the host nothing is."""
    builds = {
        **families.OPS,
        **families.QUANTISED,
        **families.LATENTS,
        **families.KV_FP8,
        **families.MODELS,
        **QUANTISED,
    }
    cpu = load_backend("cpu")
    refused = {name: cpu.capability("cpu", build("bfloat16")).refused for name, build in builds.items()}
    assert {name: why for name, why in refused.items() if why} == {}


#: What a backend need not have.
OF_FAMILIES = {name for name, _ in family_checks("float32")} | {f"quantised-{name}" for name in families.QUANTISED}


def _is_slow(name: str, case: Case) -> bool:
    """What repeats another run on a host: cuda and rocm share cpu's code, and xla multiplies 16 bits in float32. Of
    what families are made of, xla compiles each op once, and one model."""
    if name == "null":  # the same shapes in each dtype
        return case.dtype != "float32"
    if name == "cpu":
        return case.dtype == "float16" and case.name in OF_FAMILIES
    if name == "xla" and case.name in ("kv-model-unequal-heads", "kv-pages-hold-what-others-left"):
        return True  # FP8 pages: one model and one move are enough
    if case.name not in OF_FAMILIES:
        return case.dtype != "float32" and not case.name.startswith("op-")
    once = case.name.removeprefix("op-") in families.OPS or case.name == "model-latent"
    return name != "xla" or case.dtype != "float32" or not once


def _every() -> Iterator[object]:
    for name, target in TARGETS.items():
        for case in cases(load_backend(name).capability(target).dtypes):
            marks = (pytest.mark.slow,) if _is_slow(name, case) else ()
            yield pytest.param(name, case, id=f"{name}-{case}", marks=marks)


@pytest.mark.parametrize(("name", "case"), list(_every()))
def test_backend(name: str, case: Case, tmp_path: Path) -> None:
    run_case(case, load_backend(name), TARGETS[name], tmp_path, shapes_only=name == "null", device_code=False)
