"""torch-mlir: a torch module to MLIR text. Used to write slices in other forms, and to read programs that plait's IR
has no ops for. torch and torch-mlir are imported when a text is asked for, not before.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from plait.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    import torch

FORMS = {"torch": "torch", "linalg": "linalg-on-tensors", "stablehlo": "stablehlo", "tosa": "tosa"}
"""What a module can be written as -> torch-mlir's name of it."""

WHOLE = ("aten.linear", "aten.rms_norm", "aten.softmax.int", "aten.silu", "aten.gelu", "aten.einsum")
"""Ops that are not taken apart where a module is written as torch ops."""

_RESOURCE = re.compile(r'^ *([\w.]+): "0x[0-9A-F]{8}([0-9A-F]*)",?$', re.MULTILINE)


def require() -> None:
    """Raises MissingDependencyError `torch-mlir-missing` where torch or torch-mlir is not installed."""
    for wheel in ("torch", "torch_mlir"):
        if importlib.util.find_spec(wheel) is None:
            raise MissingDependencyError(
                "torch-mlir-missing",
                "this needs torch-mlir",
                why=f"{wheel!r} is not installed",
                hint="pip install 'plait[import]'",
            )


def version_text() -> str:
    """`torch-mlir 20261001.1`: what wrote a text."""
    return f"torch-mlir {version('torch-mlir')}"


def mlir_text(module: torch.nn.Module, args: Sequence[Any], form: str) -> str:
    """The module as MLIR text with one function `@main`, every constant in place.

    Args:
        module: without parameters of its own, or they become constants.
        args: tensors, fake ones too, or lists of such; each becomes an argument of `@main`, in order.
        form: one of FORMS.

    Raises:
        MissingDependencyError: `torch-mlir-missing`.
        UnsupportedError: `torch-mlir-refused`: torch cannot export the module, or torch-mlir knows no way to write it.
    """
    require()
    import torch
    from torch_mlir import fx, ir
    from torch_mlir.compiler_utils import TorchMlirCompilerError
    from torch_mlir.dialects import torch as dialect
    from torch_mlir.extras.fx_importer import FxImporter

    context = ir.Context()
    dialect.register_dialect(context)
    told: list[str] = []

    def hear(diagnostic: Any) -> bool:
        told.append(str(diagnostic.message))
        return True  # heard: it is not printed

    context.attach_diagnostic_handler(hear)
    with quiet():
        try:
            program = torch.export.export(module, tuple(args))
        except Exception as err:
            raise _refused("torch.export does not take the module apart", [str(err)]) from err
        try:
            made = fx.export_and_import(
                program,
                output_type=FORMS[form],
                fx_importer=FxImporter(context=context),
                # The other forms know only what these are made of.
                decomposition_table={} if form == "torch" else None,
                backend_legal_ops=list(WHOLE) if form == "torch" else None,
                func_name="main",
            )
        except (TorchMlirCompilerError, NotImplementedError, AssertionError, TypeError, KeyError) as err:
            raise _refused(f"torch-mlir cannot write the module as {form}", [*told, str(err)]) from err
    text = _inlined(str(made))
    # A portable artifact of StableHLO knows no other dialect; its own constants say the same.
    return text.replace("arith.constant dense", "stablehlo.constant dense") if form == "stablehlo" else text


def _refused(what: str, told: Sequence[str]) -> UnsupportedError:
    """The error with the first that was told."""
    lines = [line.strip() for line in "\n".join(told).splitlines() if line.strip()]
    return UnsupportedError("torch-mlir-refused", what, why=f"{lines[0] if lines else '':.500}")


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about torch's own insides, no log of what is raised anyway, and no report of a failed pass left among
    temporary files."""
    before, silenced = tempfile.tempdir, logging.root.manager.disable
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        tempfile.tempdir = folder
        logging.disable()
        try:
            yield
        finally:
            logging.disable(silenced)
            tempfile.tempdir = before


def _inlined(text: str) -> str:
    """Constants that stand at the end of the text as resources, put where they are used: `dense<"0x...">`.

    A resource begins with four bytes that say its alignment.
    """
    body, _, resources = text.partition("{-#")
    values = dict(_RESOURCE.findall(resources))
    return re.sub(r"dense_resource<([\w.]+)>", lambda found: f'dense<"0x{values[found[1]]}">', body).rstrip() + "\n"
