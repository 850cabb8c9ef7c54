"""The dialect as xDSL knows it, and modules as text."""

from __future__ import annotations

import io
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.ir import Dialect
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from plait.errors import VerifyError
from plait.ir.ops import OPS
from plait.ir.types import BatchType, KVType

Plait = Dialect("plait", list(OPS), [BatchType, KVType])


def context() -> Context:
    """A fresh xDSL context that knows builtin, func and plait."""
    ctx = Context()
    for dialect in (Builtin, Func, Plait):
        ctx.load_dialect(dialect)
    return ctx


def print_module(module: ModuleOp) -> str:
    """MLIR text; `parse_module` reads it back to an equal module."""
    out = io.StringIO()
    Printer(out).print_op(module)
    return out.getvalue() + "\n"


def parse_module(text: str, name: str = "<text>") -> ModuleOp:
    """Read and verify MLIR text. Raises VerifyError with the place of the fault."""
    try:
        module = Parser(context(), text, name).parse_module()
    except (ParseError, VerifyException) as err:
        raise VerifyError("ir-parse", f"{name} is not a plait module", why=str(err).strip()) from err
    verify(module)
    return module


def read_module(path: Path) -> ModuleOp:
    """`parse_module` of a file."""
    return parse_module(path.read_text(), path.name)


def verify(module: ModuleOp, after: tuple[str, ...] = ()) -> None:
    """Check every op. Raises VerifyError that shows the op; `after` names the passes that ran before."""
    try:
        module.verify()
    except VerifyException as err:
        ran = f" after the passes {', '.join(after)}" if after else ""
        raise VerifyError("ir-verify", f"the module breaks a rule of the IR{ran}", why=str(err).strip()) from err
