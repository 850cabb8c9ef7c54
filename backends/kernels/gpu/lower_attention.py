"""Attention and its rotary embeddings to launches."""

from __future__ import annotations

from plait.backends.kernels.gpu.draft import (
    LOWERING,
    Constants,
    Draft,
    Emit,
    Place,
    Places,
    Scalars,
    View,
    null,
    type_of,
    user,
)
from plait.backends.kernels.gpu.launch import Fact, Pointer
from plait.backends.kernels.gpu.product import values
from plait.backends.kernels.lowering import ROPE_TABLE, attribute_dtype, operand_dtype, refuse, rope_of, weight_name
from plait.ir.ops import AttentionOp, RopeOp
from plait.spec import kv_class

#: How the keys of a decode sequence are divided: at least so many to a part, at most so many parts. With 8 KV heads and
#: 8,192 keys a single sequence gives 256 programs, enough for any of the chips.
SPLIT_KEYS, MAX_SPLITS = 256, 32

#: Features of the widest head: of twice as many, sums no longer fit the registers of the largest chips.
WIDEST_HEAD = 256


@LOWERING.emits(RopeOp, "head_dim", "rotary_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Emit:
    operand_dtype(op, op.x)
    rope_of(op)
    head_dim = op.head_dim.value.data

    def emit(d: Draft) -> None:
        reader = user(op.result)
        if isinstance(reader, AttentionOp) and _turns(reader) is not None:
            return  # `rope_write` turns it
        x, out = d.view(op.x), d.make(op.result)
        scalars: Scalars = {"rows": "T", "x_stride": x.stride, "out_stride": out.stride}
        constants = {"HEADS": x.width // head_dim, "HEAD_DIM": head_dim, "ROTARY_DIM": op.rotated}
        d.launch("rope", {"x": x, "out": out, **_tables(d, op)}, scalars, constants)

    return emit


def _turns(op: AttentionOp) -> tuple[RopeOp, RopeOp] | None:
    """The embeddings of q and k, where both are the same one, of attention's heads, and nobody else reads them."""
    q, k = op.q.owner, op.k.owner
    if not isinstance(q, RopeOp) or not isinstance(k, RopeOp):
        return None
    same = (q.rope, q.rotated) == (k.rope, k.rotated)
    same = same and q.head_dim.value.data == k.head_dim.value.data == op.head_dim
    return (q, k) if same and user(q.result) is op and user(k.result) is op else None


def _tables(d: Draft, op: RopeOp) -> dict[str, Place]:
    rotated, rope = op.rotated, rope_of(op)
    shape = ("T", str(rotated // 2))
    return {
        "cos": d.fact(Fact("cos", "fp32", shape, rope=rope, head_dim=rotated)),
        "sin": d.fact(Fact("sin", "fp32", shape, rope=rope, head_dim=rotated)),
    }


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Emit:
    dtype = operand_dtype(op, op.q)
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    if op.head_dim > WIDEST_HEAD:
        raise refuse(op, "head_dim", op.head_dim, f"heads have at most {WIDEST_HEAD} features")
    if op.sinks is not None:
        weight_name(op, op.sinks)
    return lambda d: _Attention(d, op).emit()


class _Attention:
    """The launches of one attention: k and v into the pages, then decode sequences, then prompts."""

    def __init__(self, d: Draft, op: AttentionOp) -> None:
        self.d, self.op = d, op
        self.width = op.heads.value.data * op.head_dim
        name = kv_class(op.window_tokens)
        k_pages, v_pages = d.pages(op)
        dtype = operand_dtype(op, op.q)
        self.pages: dict[str, Place] = {"k_pages": k_pages, "v_pages": v_pages}
        self.slots = d.fact(Fact("slots", "i32", ("T",), kv_class=name))
        self.keys: dict[str, Place] = {
            **self.pages,
            "table": d.fact(Fact("table", "i32", ("S", "W"), kv_class=name)),
            "kv_lens": d.fact(Fact("kv_lens", "i32", ("S",))),
            "sinks": null(type_of(op.q)) if op.sinks is None else d.weight(values([op.sinks], dtype)),
        }
        self.scalars: Scalars = {"table_stride": "W", "scale": op.scale.value.data, "k_scale": 1.0, "v_scale": 1.0}
        softcap = 0.0 if op.softcap is None else op.softcap.value.data
        self.constants: Constants = {
            "KV_HEADS": op.kv_heads,
            "GROUP": op.heads.value.data // op.kv_heads,
            "HEAD_DIM": op.head_dim,
            "PAGE_TOKENS": d.page_tokens,
            "WINDOW": op.window_tokens or 0,
            "SOFTCAP": softcap,
            "HAS_SINKS": op.sinks is not None,
            "SPLIT_KEYS": SPLIT_KEYS,
            "MAX_SPLITS": MAX_SPLITS,
        }

    def emit(self) -> None:
        q = self.write()
        out = self.d.make(self.op.result)
        strides = {"q_stride": q.stride, "out_stride": out.stride}
        self.decode({"q": q, "out": out, **self.keys}, {**self.scalars, **strides})
        self.prefill({"q": q, "out": out, **self.keys}, {**self.scalars, **strides})

    def write(self) -> View:
        """k and v into the pages; q, turned where a rotary embedding stands before it."""
        d, op, turns = self.d, self.op, _turns(self.op)
        v = d.view(op.v)
        q, k = (d.view(op.q), d.view(op.k)) if turns is None else (d.view(turns[0].x), d.view(turns[1].x))
        q_out = q if turns is None else d.activation(q.width, q.type)
        ends: Places = {"q": null(q.type), "q_out": null(q.type)} if turns is None else {"q": q, "q_out": q_out}
        tables = dict.fromkeys(("cos", "sin"), null("fp32")) if turns is None else _tables(d, turns[0])
        places: Places = {"k": k, "v": v, "slots": self.slots, **self.pages, **ends, **tables}
        strides = {"q_stride": q.stride, "k_stride": k.stride, "v_stride": v.stride, "q_out_stride": q_out.stride}
        constants = {
            "HEADS": self.op.heads.value.data if turns else 0,
            "KV_HEADS": op.kv_heads,
            "HEAD_DIM": op.head_dim,
            "ROTARY_DIM": turns[0].rotated if turns else 0,
        }
        d.launch("rope_write", places, {"rows": "T", **strides, **self.scalars}, constants)
        return q_out

    def decode(self, places: Places, scalars: Scalars) -> None:
        """One launch, and one that adds up what was split, where any sequence is so long."""
        d, window = self.d, self.op.window_tokens
        most = MAX_SPLITS if window is None else min(MAX_SPLITS, -(-window // SPLIT_KEYS))
        heads = self.op.heads.value.data
        sizes = {"part": self.width, "part_max": heads, "part_sum": heads}
        parts = {
            name: d.activation(size, "fp32", f"D * {most}") if most > 1 else null("fp32")
            for name, size in sizes.items()
        }
        places = {**places, **parts, "decodes": d.fact(Fact("decodes", "i32", ("D", "2")))}
        scalars = {**scalars, "splits": f"min({most}, cdiv(L, {SPLIT_KEYS}))"}
        d.launch("attention_decode", places, scalars, self.constants, rows="D")
        if most > 1:
            d.launch("attention_combine", places, scalars, self.constants, rows="D", when=f"L // {SPLIT_KEYS + 1}")

    def prefill(self, places: Places, scalars: Scalars) -> None:
        d = self.d
        places = {**places, "query_starts": d.fact(Fact("query_starts", "i32", ("S + 1",)))}
        # How many tokens a tile has depends on the binary, and what the host sends on how many a tile has.
        unknown = Place(Pointer("tiles"), "i32")
        ((binary, _),) = d.pick("attention_prefill", {**places, "tiles": unknown}, scalars, self.constants)
        queries = binary.tile["BLOCK_M"] // int(self.constants["GROUP"])
        tiles = d.fact(Fact("tiles", "i32", (f"P{queries}", "2"), queries=queries))
        names = {"P": f"P{queries}"}
        d.launch("attention_prefill", {**places, "tiles": tiles}, scalars, self.constants, names=names)
