"""The modules that conformance runs: one op at a time, and small models."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.weights import weights_json
from plait.ir import Builder, Rope, print_module, weights
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
}


def op(make: Callable[[Builder, Callable[[str, int], SSAValue]], dict[str, SSAValue]]) -> Build:
    """A module around one op: its inputs are rows of tables, so that nothing else adds an error."""

    def build(dtype: str) -> ModuleOp:
        b = Builder("op", dtype)
        b.block = 0

        def rows(name: str, width: int) -> SSAValue:
            return b.embed(name, VOCABULARY, width)

        return b.finish(make(b, rows))

    return build


def attention(a: Attention) -> Build:
    return op(lambda b, rows: {"y": _attend(b, a, lambda name, width: rows(name, width))})


def _attend(b: Builder, a: Attention, project: Callable[[str, int], SSAValue]) -> SSAValue:
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
    )


OPS: dict[str, Build] = {
    "embed": op(lambda b, rows: {"y": rows("table", HIDDEN)}),
    "rms_norm": op(lambda b, rows: {"y": b.rms_norm(rows("x", HIDDEN), "w", 1e-5)}),
    "rms_norm-eps": op(lambda b, rows: {"y": b.rms_norm(rows("x", HIDDEN), "w", 0.5)}),
    "add": op(lambda b, rows: {"y": b.add(rows("x", HIDDEN), rows("z", HIDDEN))}),
    "silu_mul": op(lambda b, rows: {"y": b.silu_mul(rows("x", HIDDEN), rows("z", HIDDEN))}),
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


def _pair(b: Builder, x: SSAValue, biased: bool) -> dict[str, SSAValue]:
    """Two products of one input, which the passes fuse."""
    return {n: b.linear(x, f"{n}.w", out, f"{n}.b" if biased else None) for n, out in (("y", 40), ("z", 24))}


def _sum_and_norm(b: Builder, total: SSAValue) -> dict[str, SSAValue]:
    return {"sum": total, "y": b.rms_norm(total, "w", 1e-5)}


@dataclass(frozen=True)
class Model:
    """A small Llama-like model: one attention per block."""

    blocks: tuple[Attention, ...] = (Attention(), Attention())
    rope: str = "default"
    bias: bool = False
    tied: bool = True

    def __call__(self, dtype: str) -> ModuleOp:
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

        x = b.add(x, b.linear(_attend(b, a, project), f"{at}.o", HIDDEN))
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

#: Deep enough for seven slices.
DEEP = Model((Attention(), Attention(window=8)) * 4, tied=True)


def random_weights(module: ModuleOp) -> dict[str, NDArray[np.float32]]:
    """Tensors for every weight of the module, the same for the same name: slices of one model agree."""
    made = {}
    for name, weight in weights(module).items():
        kind = weight.result.type
        assert isinstance(kind, TensorType)
        made[name] = _random(name, kind.get_shape())
    return made


def _random(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if len(shape) == 1:  # norm scales and biases, around one
        values = 1 + 0.2 * values
    elif shape[0] != VOCABULARY:  # products keep the size of their input
        values /= np.sqrt(shape[1])
    return values.astype(np.float32)


def write_slice(folder: Path, module: ModuleOp, tensors: dict[str, NDArray[Any]], files: dict[str, bytes]) -> None:
    """A slice's folder as `plait compile` lays it out, with its weights beside it."""
    folder.mkdir(parents=True)
    refs, offset = [], 0
    with (folder / "weights.bin").open("wb") as file:
        for name, values in tensors.items():
            refs.append(WeightRef(name, "weights.bin", offset, values.nbytes, "float32", values.shape))
            offset += file.write(values.tobytes())
    (folder / "weights.json").write_text(weights_json(refs))
    (folder / "slice.mlir").write_text(print_module(module))
    for name, data in files.items():
        (folder / name).write_bytes(data)
