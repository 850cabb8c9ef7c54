"""Passes: frozen dataclasses whose fields are their options. A pipeline prints back to the string that made it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec, parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError

from plait.errors import UsageError, did_you_mean
from plait.ir.dialect import context, print_module, verify
from plait.ir.passes.fuse import FuseAddNormPass, FuseLinearPass
from plait.ir.passes.infer import InferPass
from plait.ir.passes.slice import SlicePass, slice_modules

PASSES: dict[str, type[ModulePass]] = {p.name: p for p in (InferPass, FuseLinearPass, FuseAddNormPass, SlicePass)}

#: What every slice goes through before a backend sees it.
SLICE_PIPELINE: tuple[ModulePass, ...] = (InferPass(), FuseLinearPass(), FuseAddNormPass())


def parse_passes(text: str) -> tuple[ModulePass, ...]:
    """`"fuse-linear,slice{start=0 end=15}"` to passes.

    Raises:
        UsageError: `pass-syntax`, `pass-unknown` or `pass-option`.
    """
    try:
        specs = tuple(parse_pipeline(text))
    except ArgSpecParseError as err:
        raise UsageError("pass-syntax", f"cannot read the passes {text!r}", why=str(err).strip()) from err
    return tuple(_make(spec) for spec in specs)


def _make(spec: ArgSpec) -> ModulePass:
    if spec.name not in PASSES:
        raise UsageError("pass-unknown", f"no pass {spec.name!r}", hint=did_you_mean(spec.name, PASSES))
    try:
        return PASSES[spec.name].from_pass_spec(spec)
    except ValueError as err:
        raise UsageError("pass-option", f"cannot make the pass {spec}", why=str(err).strip()) from err


def print_passes(passes: Sequence[ModulePass]) -> str:
    """The inverse of `parse_passes`."""
    return ",".join(str(item.pipeline_pass_spec()) for item in passes)


def run_passes(module: ModuleOp, passes: Sequence[ModulePass], dump: Path | None = None, name: str = "module") -> None:
    """Run passes in place, verifying after each. `dump` gets `NAME.0-PASS.mlir` ... after every pass, before the
    verifier looks at it."""
    ran: list[str] = []
    for index, item in enumerate(passes):
        item.apply(context(), module)
        ran.append(str(item.pipeline_pass_spec()))
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name}.{index}-{item.name}.mlir").write_text(print_module(module), encoding="utf-8")
        verify(module, after=tuple(ran))


__all__ = [
    "PASSES",
    "SLICE_PIPELINE",
    "FuseAddNormPass",
    "FuseLinearPass",
    "InferPass",
    "SlicePass",
    "parse_passes",
    "print_passes",
    "run_passes",
    "slice_modules",
]
