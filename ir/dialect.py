"""The dialect as xDSL knows it, and modules as text."""

from __future__ import annotations

import io
import re
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, IntegerAttr, ModuleOp
from xdsl.dialects.func import Func, FuncOp
from xdsl.ir import Dialect, Operation
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from plait.errors import VerifyError
from plait.ir.convention import ConventionError, check_convention
from plait.ir.ops import OPS
from plait.ir.types import BatchType, KVType, NF4Type, PackedType, QuantType

#: Comments and whole string literals, as xDSL knows them.
_SKIPPED = re.compile(r'''//[^\n]*|"(?:[^"\\\n\v\f]|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*"''')

Plait = Dialect("plait", list(OPS), [BatchType, KVType, NF4Type, PackedType, QuantType])


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
    _check_literals(text, name)
    parser = None
    try:
        parser = Parser(context(), text, name)  # reads the first token
        module = parser.parse_module()
    except ParseError as err:
        raise VerifyError("ir-parse", f"{name} is not a plait module", why=str(err).strip()) from err
    except Exception as err:  # a type or an attribute that does not know where it stands; an overflow, a deep nesting
        place = 0 if parser is None else len(text[: parser.pos].rstrip())
        raise _parse_error(text, name, place, _one_line(err)) from err
    verify(module)
    return module


def _check_literals(text: str, name: str) -> None:
    """xDSL's lexer takes a time exponential in the length of a literal that does not end or has a wrong escape."""
    place = _SKIPPED.sub(lambda found: " " * len(found[0]), text).find('"')
    if place >= 0:
        raise _parse_error(text, name, place, "a quote that does not close, or an unknown escape behind it")


def _parse_error(text: str, name: str, place: int, message: str) -> VerifyError:
    line = text.count("\n", 0, place)
    shown = text.split("\n")[line].strip()
    return VerifyError("ir-parse", f"{name} is not a plait module", why=f"line {line + 1}: {message}\n    {shown}")


def read_module(path: Path) -> ModuleOp:
    """`parse_module` of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise VerifyError("ir-parse", f"{path.name} is not a plait module", why=str(err)) from err
    return parse_module(text, path.name)


def verify(module: ModuleOp, after: tuple[str, ...] = ()) -> None:
    """Check every op and the rules of `@main`. Raises VerifyError that shows the op; `after` names the passes that ran
    before."""
    try:
        module.verify()
        check_convention(module)
    except VerifyException as err:
        op = err.op if isinstance(err, ConventionError) else _culprit(module)
        ran = f" after the passes {', '.join(after)}" if after else ""
        raise VerifyError(
            "ir-verify", f"{describe(op)} breaks a rule of the IR{ran}", why=f"{_one_line(err)}\n    {show(op)}"
        ) from err


def describe(op: Operation) -> str:
    """An op in a few words: `plait.linear of block 3`."""
    if isinstance(op, ModuleOp | FuncOp):
        return "@main" if isinstance(op, FuncOp) else "the module"
    block = op.properties.get("block")
    return f"{op.name} of block {block.value.data}" if isinstance(block, IntegerAttr) else op.name


def show(op: Operation) -> str:
    """The op's (first) line as it stands in the text of its module."""
    root = op.get_toplevel_object()
    printer = _LinePrinter(io.StringIO(), wanted=op)
    printer.print_op(root if isinstance(root, Operation) else op)
    return printer.line


class _LinePrinter(Printer):
    """Values are numbered in the order of printing, so an op's own line is known only when its module is printed."""

    def __init__(self, out: io.StringIO, wanted: Operation) -> None:
        super().__init__(out)
        self._out, self._wanted, self.line = out, wanted, ""

    def print_op(self, op: Operation) -> None:
        start = self._out.tell()
        super().print_op(op)
        if op is self._wanted:
            self.line = self._out.getvalue()[start:].strip().split("\n", 1)[0]


def _culprit(module: ModuleOp) -> Operation:
    """The op that xDSL's verifier complains about: it says what is wrong, not where."""
    for op in module.walk():
        try:
            op.verify(verify_nested_ops=False)
        except VerifyException:
            return op
    return module


def _one_line(err: Exception) -> str:
    return " ".join(str(err).split())
