"""Kernels bound by memory: what each takes. The code is in `sources/{embed,norm,rope,elementwise,head}.py`.

Tensors are (rows, width) with a row stride in elements and adjacent values in a row. Everything is computed in float32
and rounded once at the store. Words in the expressions: `<pointer>_bytes` is the size of one element of that pointer.

Constants:
    BLOCK (of the norms): the next power of two of H.
    GROUPS (of the norms): how many runs of H features a row has, each normed by itself.
    HEADS, KV_HEADS, HEAD_DIM: of q, and of k and v. HEADS 0 in `rope_write`: q and q_out are left alone.
    ROTARY_DIM: pairs (i, i + ROTARY_DIM / 2) of each head turn, the rest passes through; 0: nothing turns, and cos and
        sin are left alone. cos and sin are float32 (rows, ROTARY_DIM / 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_SOURCES = "plait.backends.kernels.gpu.sources"

#: out[r] = factor table[tokens[r]]; tokens i32, never negative; the table's rows are H apart.
EMBED = Kernel(
    name="embed",
    source=f"{_SOURCES}.embed:embed",
    pointers=("tokens", "table", "out"),
    scalars={"rows": "i32", "H": "i32", "out_stride": "i32", "factor": "f32"},
    constants=(),
    tile=("BLOCK",),
    grid=("rows", "cdiv(H, BLOCK)", "1"),
    nature="stream",
    written=("out",),
    bytes="rows * H * (table_bytes + out_bytes)",
)

#: out[r] = x[index[r]]; index i32, never negative.
GATHER_ROWS = Kernel(
    name="gather_rows",
    source=f"{_SOURCES}.embed:gather_rows",
    pointers=("x", "index", "out"),
    scalars={"rows": "i32", "H": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=(),
    tile=("BLOCK",),
    grid=("rows", "cdiv(H, BLOCK)", "1"),
    nature="stream",
    written=("out",),
    bytes="rows * H * (x_bytes + out_bytes)",
)

_NORM_SCALARS = ("rows", "H", "x_stride", "out_stride", "weight_stride")


def _norm(name: str, flops: int, weights: tuple[str, ...], constants: tuple[str, ...], *numbers: str) -> Kernel:
    """x (rows, GROUPS * H) to out; the weights of group i start at i * weight_stride: H, or 0 where they are shared."""
    return Kernel(
        name=name,
        source=f"{_SOURCES}.norm:{name}",
        pointers=("x", *weights, "out"),
        scalars={**dict.fromkeys(_NORM_SCALARS, "i32"), **dict.fromkeys(numbers, "f32")},
        constants=("GROUPS", *constants, "BLOCK"),
        tile=("BLOCK_GROUPS",),
        grid=("rows", "cdiv(GROUPS, BLOCK_GROUPS)", "1"),
        nature="stream",
        written=("out",),
        flops=f"{flops} * rows * GROUPS * H",
        bytes="rows * GROUPS * H * (x_bytes + out_bytes) + H * weight_bytes",
    )


#: out = x / sqrt(mean(x^2) + eps) * (weight + offset), per group.
RMS_NORM = _norm("rms_norm", 4, ("weight",), (), "eps", "offset")

#: out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, per group; HAS_BIAS.
LAYER_NORM = _norm("layer_norm", 8, ("weight", "bias"), ("HAS_BIAS",), "eps")

#: total = x + y, rounded to total's type; out = rms_norm(total), one group. total may be x or y.
ADD_RMS_NORM = Kernel(
    name="add_rms_norm",
    source=f"{_SOURCES}.norm:add_rms_norm",
    pointers=("x", "y", "weight", "total", "out"),
    scalars={
        "rows": "i32",
        "H": "i32",
        "x_stride": "i32",
        "y_stride": "i32",
        "total_stride": "i32",
        "out_stride": "i32",
        "eps": "f32",
        "offset": "f32",
    },
    constants=("BLOCK",),
    tile=(),
    grid=("rows", "1", "1"),
    nature="stream",
    written=("total", "out"),
    flops="5 * rows * H",
    bytes="rows * H * (x_bytes + y_bytes + total_bytes + out_bytes) + H * weight_bytes",
)

#: x (rows, HEADS * HEAD_DIM) turned. out may be x.
ROPE = Kernel(
    name="rope",
    source=f"{_SOURCES}.rope:rope",
    pointers=("x", "cos", "sin", "out"),
    scalars={"rows": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=("HEADS", "HEAD_DIM", "ROTARY_DIM"),
    tile=("BLOCK_HEADS",),
    grid=("rows", "cdiv(HEADS, BLOCK_HEADS)", "1"),
    nature="stream",
    written=("out",),
    flops="3 * rows * HEADS * HEAD_DIM",
    bytes="rows * HEADS * HEAD_DIM * (x_bytes + out_bytes) + 4 * rows * ROTARY_DIM",
)

#: q turned into q_out (which may be q); k turned, and v, into k_pages and v_pages, (page, token, kv_head, head_dim), at
#: slots[r] = page * page_tokens + token, i32; -1 writes nothing. Pages of an fp8 type, or of u8 (`sources/fp8.py`),
#: hold value / scale, the value in k's type, clamped to the range of fp8; for other types the scales are left alone.
ROPE_WRITE = Kernel(
    name="rope_write",
    source=f"{_SOURCES}.rope:rope_write",
    pointers=("q", "k", "v", "cos", "sin", "slots", "q_out", "k_pages", "v_pages"),
    scalars={
        "rows": "i32",
        "q_stride": "i32",
        "k_stride": "i32",
        "v_stride": "i32",
        "q_out_stride": "i32",
        "k_scale": "f32",
        "v_scale": "f32",
    },
    constants=("HEADS", "KV_HEADS", "HEAD_DIM", "ROTARY_DIM"),
    tile=("BLOCK_HEADS",),
    grid=("rows", "cdiv(HEADS, BLOCK_HEADS) + cdiv(KV_HEADS, BLOCK_HEADS)", "1"),
    nature="stream",
    written=("q_out", "k_pages", "v_pages"),
    flops="3 * rows * (HEADS + KV_HEADS) * HEAD_DIM",
    bytes="rows * HEAD_DIM * (HEADS * (q_bytes + q_out_bytes) + KV_HEADS * (k_bytes + v_bytes + 2 * k_pages_bytes))"
    " + 4 * rows * ROTARY_DIM",
)


def _elementwise(name: str, flops: int, inputs: str, constants: tuple[str, ...] = (), *numbers: str) -> Kernel:
    """Inputs (rows, N) to out, which may be one of them."""
    whole = ("rows", "N", *(f"{pointer}_stride" for pointer in (*inputs, "out")))
    return Kernel(
        name=name,
        source=f"{_SOURCES}.elementwise:{name}",
        pointers=(*inputs, "out"),
        scalars={**dict.fromkeys(whole, "i32"), **dict.fromkeys(numbers, "f32")},
        constants=constants,
        tile=("BLOCK",),
        grid=("rows", "cdiv(N, BLOCK)", "1"),
        nature="stream",
        written=("out",),
        flops=f"{flops} * rows * N",
        bytes=f"rows * N * ({' + '.join(f'{pointer}_bytes' for pointer in (*inputs, 'out'))})",
    )


ADD = _elementwise("add", 1, "xy")

#: silu(x) * y
SILU_MUL = _elementwise("silu_mul", 5, "xy")

#: gelu(x) * y; APPROXIMATE: the tanh form.
GELU_MUL = _elementwise("gelu_mul", 8, "xy", ("APPROXIMATE",))

#: gelu(x)
GELU = _elementwise("gelu", 7, "x", ("APPROXIMATE",))

#: factor x
SCALE = _elementwise("scale", 1, "x", (), "factor")

#: limit * tanh(factor x / limit)
SOFTCAP = _elementwise("softcap", 8, "x", (), "factor", "limit")

#: out[r], i32: `plait.backends.base.best_tokens`, the first place of the largest of V values.
ARGMAX = Kernel(
    name="argmax",
    source=f"{_SOURCES}.head:argmax",
    pointers=("logits", "out"),
    scalars={"rows": "i32", "V": "i32", "stride": "i32"},
    constants=(),
    tile=("BLOCK",),
    grid=("rows", "1", "1"),
    nature="stream",
    written=("out",),
    flops="rows * V",
    bytes="rows * V * logits_bytes",
)

KERNELS = (
    *(EMBED, GATHER_ROWS, RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ROPE, ROPE_WRITE),
    *(ADD, SILU_MUL, GELU_MUL, GELU, SCALE, SOFTCAP, ARGMAX),
)

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_LOAD_BYTES = 16
"""The widest load of a thread."""


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling: every thread has one widest load of each input, or a few."""
    # The narrowest input decides: where it has a whole load, the others have several.
    vector = _LOAD_BYTES // min(_BYTES.get(types[name], _LOAD_BYTES) for name in kernel.pointers)
    lanes = vector * arch.warp
    most_warps = 1024 // arch.warp
    if kernel in (ROPE, ROPE_WRITE):
        across = int(constants["ROTARY_DIM"]) // 2 or int(constants["HEAD_DIM"])
        heads = max(int(constants["HEADS"]), int(constants.get("KV_HEADS", 0)))
        return _head_tiles("BLOCK_HEADS", heads, across, lanes)
    if int(constants.get("GROUPS", 1)) > 1:
        return _head_tiles("BLOCK_GROUPS", int(constants["GROUPS"]), int(constants["BLOCK"]), lanes)
    if kernel in (RMS_NORM, ADD_RMS_NORM, LAYER_NORM):
        width = int(constants["BLOCK"])
        warps = {min(most_warps, max(1, width // (lanes * loads))) for loads in (1, 2, 4)}
        own = dict.fromkeys(kernel.tile, 1)
        return tuple(Tile(own, num_warps=count) for count in sorted(warps, reverse=True))
    shapes = ((16, 4), (16, 2), (8, 2)) if kernel is ARGMAX else ((4, 1), (1, 1), (4, 2), (8, 2))
    return tuple(Tile({"BLOCK": lanes * warps * loads}, num_warps=warps) for warps, loads in shapes)


def _head_tiles(name: str, heads: int, across: int, lanes: int) -> tuple[Tile, ...]:
    """As many heads to a program as its threads have loads of `across` values for, no more than there are."""
    across = 1 << (across - 1).bit_length()
    most = 1 << (heads - 1).bit_length()
    tiles: dict[int, Tile] = {}
    for warps in (1, 2, 4):
        block = min(most, max(1, lanes * warps // across))
        tiles.setdefault(block, Tile({name: block}, num_warps=warps))
    return tuple(tiles.values())
