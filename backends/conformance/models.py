"""The modules that conformance runs: one op at a time, and small models."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import IntegerType, ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.quantised import pack_u4, to_blocks
from plait.backends.weights import weights_json
from plait.ir import Builder, Rope, print_module, weights
from plait.ir.numbers import BOOKS, NUMPY, Quantised
from plait.ir.quant import quantise_types
from plait.ir.types import CODE_MAX, FP8, QuantType, bits
from plait.spec import WeightRef

VOCABULARY = 61
HIDDEN = 48

Build = Callable[[str], ModuleOp]
"""From a dtype to a module."""

ROPES: dict[str, Rope] = {
    "default": Rope(10000.0),
    "linear": Rope(10000.0, "linear", factor=4.0),
    # The scripts reach position 257, well beyond the original length and with a wavelength in each of the three bands.
    "llama3": Rope(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=32),
}


@dataclass(frozen=True)
class Attention:
    """Attributes of one attention; None means off."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    scale: float = 0.25
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None


ATTENTIONS: dict[str, Attention] = {
    "mha": Attention(heads=3, kv_heads=3),
    "gqa3": Attention(),
    "mqa8": Attention(heads=8, kv_heads=1),
    "head-dim-32": Attention(heads=4, kv_heads=2, head_dim=32),
    "scale": Attention(scale=0.7),
    "window8": Attention(window=8),
    "window1": Attention(window=1),
    "window20": Attention(heads=8, kv_heads=1, window=20),
    "softcap": Attention(scale=1.5, softcap=2.0),
    "window-softcap": Attention(scale=1.5, window=8, softcap=2.0),
    "sinks": Attention(sinks=True),
    "mqa8-window8-sinks": Attention(heads=8, kv_heads=1, window=8, sinks=True),
    "softcap-sinks": Attention(scale=1.5, softcap=2.0, sinks=True),
}

KV_FP8: dict[str, Attention] = {
    **{name: Attention(kv_dtype=name) for name in FP8},
    "e4m3fn-window8-sinks": Attention(heads=8, kv_heads=1, window=8, sinks=True, kv_dtype="e4m3fn"),
    "e4m3fn-softcap": Attention(scale=1.5, softcap=2.0, kv_dtype="e4m3fn"),
}
"""What a backend may refuse."""


Make = Callable[[Builder, Callable[[str, int], SSAValue]], dict[str, SSAValue]]


def op(make: Make, quantised: Mapping[str, QuantType] | None = None) -> Build:
    """A module around one op: its inputs are rows of tables, so that nothing else adds an error. Weights named in
    `quantised` are."""

    def build(dtype: str) -> ModuleOp:
        b = Builder("op", dtype)
        b.block = 0

        def rows(name: str, width: int) -> SSAValue:
            return b.embed(name, VOCABULARY, width)

        module = b.finish(make(b, rows))
        quantise_types(module, quantised or {})
        return module

    return build


def attention(a: Attention) -> Build:
    return op(lambda b, rows: {"y": attend(b, a, lambda name, width: rows(name, width))})


def attend(b: Builder, a: Attention, project: Callable[[str, int], SSAValue], at: str = "") -> SSAValue:
    """The attention of what `project` makes of a name and a width; its sinks are named after `at`."""
    q, k, v = (project(n, h * a.head_dim) for n, h in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)))
    return b.attention(
        q,
        k,
        v,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        sinks=f"{at}sinks" if a.sinks else None,
        kv_dtype=a.kv_dtype,
    )


OPS: dict[str, Build] = {
    "embed": op(lambda b, rows: {"y": rows("table", HIDDEN)}),
    "rms_norm": op(lambda b, rows: {"y": b.rms_norm(rows("x", HIDDEN), "w", 1e-5)}),
    "rms_norm-eps": op(lambda b, rows: {"y": b.rms_norm(rows("x", HIDDEN), "w", 0.5)}),
    "add": op(lambda b, rows: {"y": b.add(rows("x", HIDDEN), rows("z", HIDDEN))}),
    "silu_mul": op(lambda b, rows: {"y": b.silu_mul(rows("x", HIDDEN), rows("z", HIDDEN))}),
    "gelu_mul-none": op(lambda b, rows: {"y": b.gelu_mul(rows("x", HIDDEN), rows("z", HIDDEN))}),
    "gelu_mul-tanh": op(lambda b, rows: {"y": b.gelu_mul(rows("x", HIDDEN), rows("z", HIDDEN), "tanh")}),
    "linear": op(lambda b, rows: {"y": b.linear(rows("x", HIDDEN), "w", 80)}),
    "linear-bias": op(lambda b, rows: {"y": b.linear(rows("x", HIDDEN), "w", 33, "b")}),
    "linears": op(lambda b, rows: _pair(b, rows("x", HIDDEN), False)),
    "linears-bias": op(lambda b, rows: _pair(b, rows("x", HIDDEN), True)),
    "logits": op(lambda b, rows: {"logits": b.logits(rows("x", HIDDEN), "w", 97)}),
    "add_rms_norm": op(lambda b, rows: _sum_and_norm(b, b.add(rows("x", HIDDEN), rows("z", HIDDEN)))),
    **{
        f"rope-{name}": op(lambda b, rows, r=rope: {"y": b.rope(rows("x", 64), 32, r)})  # type: ignore[misc]
        for name, rope in ROPES.items()
    },
}


SUMS = op(lambda b, rows: {"logits": b.logits(b.add(_sum(b, rows, "xy"), _sum(b, rows, "zu")), "w", 97)})
"""Logits of the sum of four tables."""


def _sum(b: Builder, rows: Callable[[str, int], SSAValue], names: str) -> SSAValue:
    x, y = (rows(name, HIDDEN) for name in names)
    return b.add(x, y)


def _pair(b: Builder, x: SSAValue, biased: bool) -> dict[str, SSAValue]:
    """Two products of one input, which the passes fuse."""
    return {n: b.linear(x, f"{n}.w", out, f"{n}.b" if biased else None) for n, out in (("y", 40), ("z", 24))}


FORMATS: dict[str, QuantType] = {
    "e4m3fn-tensor": QuantType.get("e4m3fn"),
    "e4m3fn-row": QuantType.get("e4m3fn", "bfloat16", (1, 0)),
    "e4m3fn-block": QuantType.get("e4m3fn", "float32", (32, 48)),  # the last blocks are cut short both ways
    "e4m3fnuz-tensor": QuantType.get("e4m3fnuz"),
    "e5m2-group": QuantType.get("e5m2", "float16", (1, 16)),
    "i8-row": QuantType.get("i8", "float32", (1, 0)),
    "i8-group": QuantType.get("i8", "float16", (1, 32)),
    "u4-group": QuantType.get("u4", "float16", (1, 32), zero=8),
    "u4-zeros": QuantType.get("u4", "float16", (1, 16), zero="float16"),
    "u4-min": QuantType.get("u4", "float16", (1, 32), minimum="float16"),
    "u8-order": QuantType.get("u8", "float16", (1, 16), zero="float16", ordered=True),
    "e2m1-e8m0": QuantType.get("e2m1", "e8m0", (1, 32)),
    "e2m1-outer": QuantType.get("e2m1", "e4m3fn", (1, 16), outer=True),
    "nf4-group": QuantType.get("nf4", "float32", (1, 64)),
}
"""Formats of weights; a backend may refuse any of them."""

QUANTISED: dict[str, Build] = {
    **{
        f"linear-{name}": op(lambda b, rows: {"y": b.linear(rows("x", 64), "w", 80, "b")}, {"w": kind})
        for name, kind in FORMATS.items()
    },
    "linears-e4m3fn-block": op(
        lambda b, rows: _pair(b, rows("x", HIDDEN), True), dict.fromkeys(("y.w", "z.w"), FORMATS["e4m3fn-block"])
    ),
    "logits-i8-row": op(lambda b, rows: {"logits": b.logits(rows("x", HIDDEN), "w", 97)}, {"w": FORMATS["i8-row"]}),
    "embed-u4-zeros": op(lambda b, rows: {"y": rows("table", HIDDEN)}, {"table": FORMATS["u4-zeros"]}),
}


def _sum_and_norm(b: Builder, total: SSAValue) -> dict[str, SSAValue]:
    return {"sum": total, "y": b.rms_norm(total, "w", 1e-5)}


@dataclass(frozen=True)
class Model:
    """A small Llama-like model: one attention per block."""

    blocks: tuple[Attention, ...] = (Attention(), Attention())
    rope: str = "default"
    bias: bool = False
    tied: bool = True
    format: str | None = None

    def __call__(self, dtype: str) -> ModuleOp:
        module = self._plain(dtype)
        if self.format is not None:
            matrices = [name for name in weights(module) if re.fullmatch(r"\d+\.([qkv]\.w|o|gate|up|down)", name)]
            quantise_types(module, dict.fromkeys(matrices, FORMATS[self.format]))
        return module

    def _plain(self, dtype: str) -> ModuleOp:
        b = Builder("model", dtype)
        x = b.embed("embed", VOCABULARY, HIDDEN)
        for index, a in enumerate(self.blocks):
            b.block = index
            x = self._block(b, x, a, f"{index}")
        b.block = None
        x = b.rms_norm(x, "norm", 1e-6)
        return b.finish({"logits": b.logits(x, "embed" if self.tied else "head", VOCABULARY)})

    def _block(self, b: Builder, x: SSAValue, a: Attention, at: str) -> SSAValue:
        h = b.rms_norm(x, f"{at}.in", 1e-6)

        def project(name: str, width: int) -> SSAValue:
            y = b.linear(h, f"{at}.{name}.w", width, f"{at}.{name}.b" if self.bias else None)
            return y if name == "v" else b.rope(y, a.head_dim, ROPES[self.rope])

        x = b.add(x, b.linear(attend(b, a, project, f"{at}."), f"{at}.o", HIDDEN))
        h = b.rms_norm(x, f"{at}.post", 1e-6)
        h = b.silu_mul(b.linear(h, f"{at}.gate", 80), b.linear(h, f"{at}.up", 80))
        return b.add(x, b.linear(h, f"{at}.down", HIDDEN))


MODELS: dict[str, Model] = {
    "gqa": Model(),
    "bias": Model(bias=True, tied=False, rope="linear"),
    "window-and-full": Model((Attention(window=8), Attention(), Attention(window=20)), rope="llama3"),
    "unequal-heads": Model((Attention(heads=4, kv_heads=4, head_dim=32), Attention(heads=8, kv_heads=1))),
    "softcap": Model((Attention(scale=1.5, softcap=2.0), Attention(window=8, softcap=3.0))),
}

KV_MODELS: dict[str, Model] = {
    "unequal-heads": Model(
        (
            Attention(heads=4, kv_heads=4, head_dim=32, kv_dtype="e4m3fn"),
            Attention(heads=8, kv_heads=1, kv_dtype="e4m3fn"),
        )
    ),
    "window-and-full": Model((Attention(window=8, kv_dtype="e4m3fn"), Attention(sinks=True, kv_dtype="e4m3fn"))),
}

QUANTISED |= {
    "model-e4m3fn-block": Model(bias=True, format="e4m3fn-block"),
    "model-u4-zeros": Model((Attention(window=8), Attention(sinks=True)), format="u4-zeros"),
}

#: Deep enough for seven slices.
DEEP = Model((Attention(), Attention(window=8)) * 4, tied=True)


def random_weights(module: ModuleOp) -> dict[str, NDArray[np.float32] | Quantised]:
    """Tensors for every weight of the module, the same for the same name: slices of one model agree."""
    made: dict[str, NDArray[np.float32] | Quantised] = {}
    for name, weight in weights(module).items():
        kind = weight.result.type
        assert isinstance(kind, TensorType)
        shape, element = kind.get_shape(), kind.element_type
        made[name] = _quantised(name, shape, element) if isinstance(element, QuantType) else _random(name, shape)
    return made


def _random(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if len(shape) == 1:  # norm scales and biases, around one
        values = 1 + 0.2 * values
    elif shape[0] != VOCABULARY:  # products keep the size of their input
        values /= np.sqrt(shape[-1])
    return values.astype(np.float32)


def _quantised(name: str, shape: tuple[int, ...], kind: QuantType) -> Quantised:
    """Codes over much of their range; scales differ by up to three, and values are as large as `_random`'s."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    parts, (middle, spread) = kind.scale_shape(shape), _CODES[kind.code_name]
    if kind.code_name in BOOKS:
        codes = rng.integers(0, 16, shape)
    else:
        drawn = (kind.zero_point or middle) + spread * rng.standard_normal(shape)
        largest = CODE_MAX[kind.code_name]
        whole = np.rint(drawn) if isinstance(kind.code, IntegerType) else drawn
        codes = np.clip(whole, 0 if middle else -largest, largest)
    size = 1.0 if shape[0] == VOCABULARY else shape[-1] ** -0.5
    outer = (0.1 * rng.uniform(0.5, 1.5, shape[:-2])).astype(np.float32) if kind.has_outer else None
    size = size if outer is None else size * 10
    scale = (size / spread * rng.uniform(0.5, 1.5, parts)).astype(NUMPY[kind.scale_dtype])
    zero = None if kind.zero_dtype is None else (middle + rng.integers(-2, 3, parts)).astype(NUMPY[kind.zero_dtype])
    least = None if kind.minimum_dtype is None else (-8 * scale).astype(NUMPY[kind.minimum_dtype])
    order = rng.integers(0, parts[-1], (*shape[:-2], shape[-1]), np.int32) if kind.is_ordered else None
    return Quantised(kind, codes.astype(NUMPY[kind.code_name]), scale, zero, least, outer, order)


#: Where codes lie, and how far apart; of those in a book, what their numbers differ by.
_CODES: dict[str, tuple[int, float]] = {
    **dict.fromkeys((*FP8, "i8"), (0, 16.0)),
    "u4": (8, 4.0),
    "u8": (128, 32.0),
    "e2m1": (0, 2.9),
    "nf4": (0, 0.6),
}


def write_slice(
    folder: Path, module: ModuleOp, tensors: Mapping[str, NDArray[Any] | Quantised], files: Mapping[str, bytes]
) -> None:
    """A slice's folder as `plait compile` lays it out, with its weights beside it."""
    folder.mkdir(parents=True)
    with (folder / "weights.bin").open("wb") as file:
        refs = [_written(file, name, values) for name, values in tensors.items()]
    (folder / "weights.json").write_text(weights_json(refs))
    (folder / "slice.mlir").write_text(print_module(module))
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _written(file: BinaryIO, name: str, values: NDArray[Any] | Quantised) -> WeightRef:
    def stored(part: str, array: NDArray[Any], encoding: str, shape: tuple[int, ...] | None = None) -> WeightRef:
        offset = file.tell()
        size = file.write(array.tobytes())
        return WeightRef(part, "weights.bin", offset, size, encoding, shape or array.shape)  # type: ignore[arg-type]

    if not isinstance(values, Quantised):
        return stored(name, values, "float32")
    kind, shape = values.kind, values.codes.shape
    if kind.minimum_dtype is not None:  # GGUF's way is the only one
        return stored(name, to_blocks(values, "Q4_1"), "Q4_1", shape)
    codes = pack_u4(values.codes) if bits(kind.code) == 4 else values.codes
    scale = stored(f"{name}.scale", values.scale, kind.scale_dtype)
    zero = kind.zero_point if values.zero is None else stored(f"{name}.zero", values.zero, str(kind.zero_dtype))
    outer = None if values.outer is None else stored(f"{name}.outer", values.outer.reshape(-1), "float32")
    order = None if values.order is None else stored(f"{name}.order", values.order, "i32")
    own = stored(name, codes, kind.code_name, shape)
    return replace(own, scale=scale, block=kind.block, zero=zero, outer=outer, group_of=order)
