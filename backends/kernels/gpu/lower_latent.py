"""Latent attention, and the products of its heads, to launches."""

from __future__ import annotations

from plait.backends.kernels.gpu.draft import LOWERING, Constants, Draft, Emit, Place, Places, Scalars, null
from plait.backends.kernels.gpu.gemm import even_k
from plait.backends.kernels.gpu.launch import Fact, Pointer
from plait.backends.kernels.gpu.product import values
from plait.backends.kernels.lowering import attribute_dtype, operand_dtype, refuse, weight_name
from plait.ir.ops import HeadLinearOp, LatentAttentionOp
from plait.spec import kv_class

#: As of `lower_attention`. Fewer parts: each has the sums of all heads, 512 values wide, in float32.
SPLIT_KEYS, MAX_SPLITS = 256, 16

#: Heads of one program of `latent_prefill`: the fewest rows of a matrix instruction.
_GROUP = 16


@LOWERING.emits(HeadLinearOp, "transposed")
def _head_linear(op: HeadLinearOp) -> Emit:
    weight_name(op, op.weight)
    dtype = operand_dtype(op, op.x)
    heads, width, inner = op.sizes

    def emit(d: Draft) -> None:
        x, out = d.view(op.x), d.make(op.result)
        places: Places = {"x": x, "w": d.weight(values([op.weight], dtype)), "out": out}
        scalars: Scalars = {"rows": "T", "N": width, "K": inner, "x_stride": x.stride, "out_stride": out.stride}
        constants: Constants = {"HEADS": heads, "TRANSPOSED": op.transposed is not None, "EVEN_K": even_k(inner)}
        d.launch("gemm_heads", places, scalars, constants)

    return emit


@LOWERING.emits(LatentAttentionOp, "heads", "scale")
def _latent_attention(op: LatentAttentionOp) -> Emit:
    dtype = operand_dtype(op, op.q_latent)
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    return lambda d: _LatentAttention(d, op).emit()


class _LatentAttention:
    """The launches of one attention: rows into the pages, then decode sequences, then prompts."""

    def __init__(self, d: Draft, op: LatentAttentionOp) -> None:
        self.d, self.op = d, op
        self.heads, (self.latent, rope) = op.heads.value.data, op.widths
        name = kv_class(None)
        self.pages = d.pages(op)[0]
        self.slots = d.fact(Fact("slots", "i32", ("T",), kv_class=name))
        q, q_rope = d.view(op.q_latent), d.view(op.q_rope)
        out = d.make(op.result)
        self.places: Places = {
            "q": q,
            "q_rope": q_rope,
            "k_pages": self.pages,
            "table": d.fact(Fact("table", "i32", ("S", "W"), kv_class=name)),
            "kv_lens": d.fact(Fact("kv_lens", "i32", ("S",))),
            "out": out,
        }
        self.scalars: Scalars = {
            "table_stride": "W",
            "scale": op.scale.value.data,
            "q_stride": q.stride,
            "q_rope_stride": q_rope.stride,
            "out_stride": out.stride,
        }
        self.constants: Constants = {
            "HEADS": self.heads,
            "LATENT": self.latent,
            "ROPE": rope,
            "GROUP": min(_GROUP, 1 << (self.heads - 1).bit_length()),
            "PAGE_TOKENS": d.page_tokens,
            "SPLIT_KEYS": SPLIT_KEYS,
            "MAX_SPLITS": MAX_SPLITS,
        }

    def emit(self) -> None:
        latent, k_rope = self.d.view(self.op.latent), self.d.view(self.op.k_rope)
        places: Places = {"latent": latent, "k_rope": k_rope, "slots": self.slots, "k_pages": self.pages}
        strides: Scalars = {"rows": "T", "latent_stride": latent.stride, "rope_stride": k_rope.stride}
        self.d.launch("latent_write", places, strides, self.constants)
        self.decode()
        self.prefill()

    def decode(self) -> None:
        """One launch, and one that adds up what was split, where any sequence is so long."""
        d, rows = self.d, f"D * {MAX_SPLITS}"
        sizes = {"part": self.heads * self.latent, "part_max": self.heads, "part_sum": self.heads}
        parts = {name: d.activation(size, "fp32", rows) for name, size in sizes.items()}
        places: Places = {**self.places, **parts, "decodes": d.fact(Fact("decodes", "i32", ("D", "2")))}
        scalars = {**self.scalars, "splits": f"min({MAX_SPLITS}, cdiv(L, {SPLIT_KEYS}))"}
        d.launch("latent_decode", places, scalars, self.constants, rows="D")
        # What it adds up is one KV head's, without sinks, a window or a scale of values.
        alike: Constants = {"KV_HEADS": 1, "GROUP": self.heads, "HEAD_DIM": self.latent, "WINDOW": 0}
        constants = {**self.constants, **alike, "HAS_SINKS": False}
        places = {**places, "sinks": null(d.view(self.op.q_latent).type)}
        when = f"L // {SPLIT_KEYS + 1}"
        d.launch("attention_combine", places, {**scalars, "v_scale": 1.0}, constants, rows="D", when=when)

    def prefill(self) -> None:
        d = self.d
        places: Places = {**self.places, "query_starts": d.fact(Fact("query_starts", "i32", ("S + 1",)))}
        # How many tokens a tile has depends on the binary, and what the host sends on how many a tile has.
        unknown = Place(Pointer("tiles"), "i32")
        ((binary, _),) = d.pick("latent_prefill", {**places, "tiles": unknown}, self.scalars, self.constants)
        queries = binary.tile["BLOCK_M"] // int(self.constants["GROUP"])
        tiles = d.fact(Fact("tiles", "i32", (f"P{queries}", "2"), queries=queries))
        names = {"P": f"P{queries}"}
        d.launch("latent_prefill", {**places, "tiles": tiles}, self.scalars, self.constants, names=names)
