"""The shared IR: an MLIR dialect called `plait`, in xDSL.

`plait.ir.build.Builder` makes modules, `plait.ir.passes` change them, `plait.ir.oracle.Oracle` says what they mean,
`plait.ir.facts` what they cost.
"""

from plait.ir.build import Builder
from plait.ir.dialect import parse_module, print_module, read_module, verify
from plait.ir.facts import Cost, Step
from plait.ir.module import block_count, kv_classes, kv_layouts, ops, signature, weights
from plait.ir.rope import Rope

__all__ = [
    "Builder",
    "Cost",
    "Rope",
    "Step",
    "block_count",
    "kv_classes",
    "kv_layouts",
    "ops",
    "parse_module",
    "print_module",
    "read_module",
    "signature",
    "verify",
    "weights",
]
