"""Type inference, after a rewrite that changed the type of something upstream."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter
from xdsl.utils.exceptions import VerifyException

from plait.errors import VerifyError
from plait.ir.dialect import describe, show
from plait.ir.module import main, ops


@dataclass(frozen=True)
class InferPass(ModulePass):
    """Give every op, and the function, the result types that its own rule says, from top to bottom."""

    name = "infer"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for item in ops(op):
            try:
                kinds = item.infer()
            except VerifyException as err:
                raise VerifyError(
                    "ir-infer", f"no result type fits {describe(item)}", why=f"{err}\n    {show(item)}"
                ) from err
            for result, kind in zip(item.results, kinds, strict=True):
                if result.type != kind:
                    Rewriter.replace_value_with_new_type(result, kind)
        main(op).update_function_type()  # type: ignore[no-untyped-call]
