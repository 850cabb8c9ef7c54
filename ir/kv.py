"""What attentions keep their K and V in."""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.rewriter import Rewriter

from plait.errors import UnsupportedError
from plait.ir.dialect import verify
from plait.ir.module import main, ops
from plait.ir.ops import CACHING, OpaqueOp
from plait.ir.types import FP8, KVType


def store_kv(module: ModuleOp, code: str) -> None:
    """Have every attention of a module keep K and V in an FP8, see `KVType`; what it computes in stays.

    Raises UnsupportedError `kv-dtype` where something else keeps KV: an opaque program.
    """
    for op in ops(module):
        if not isinstance(op, CACHING):
            continue
        if isinstance(op, OpaqueOp):
            raise UnsupportedError("kv-dtype", f"{op.name} keeps no K and V that could be stored in FP8")
        kind = op.cache
        made = KVType(kind.kv_heads, kind.head_dim, FP8[code], kind.window, kind.values)
        Rewriter.replace_value_with_new_type(op.kv, made)
    main(module).update_function_type()  # type: ignore[no-untyped-call]
    verify(module)
