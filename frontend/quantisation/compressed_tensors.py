"""compressed-tensors: one group of all linears, in one of its formats.

Activations that are quantised too are computed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation.base import FLOATS, UNQUANTISED, Block, Parts, Quantisation, block_of, names, refuse
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding
from plait.words import counted

_STATISTICS = "says how scales were found"


@dataclass(frozen=True)
class Format:
    """How a format stores codes.

    Attributes:
        numbers: (type, bits) of codes -> what they are stored as, what they are, and codes in a stored element.
        strategies: how scales may be laid out.
        name: what follows the module's name.
        middle: codes are stored with half of their range added.
        scales: what scales are stored as.
        outer: there is a scale of scales, which divides them.
    """

    numbers: dict[tuple[str, int], tuple[Encoding, Encoding, int]]
    strategies: tuple[str, ...]
    name: str = ".weight_packed"
    middle: bool = False
    scales: tuple[Encoding, ...] = FLOATS
    outer: bool = False


_INT8: dict[tuple[str, int], tuple[Encoding, Encoding, int]] = {("int", 8): ("i8", "i8", 1)}
_FP8: dict[tuple[str, int], tuple[Encoding, Encoding, int]] = {("float", 8): ("e4m3fn", "e4m3fn", 1)}
_FP4: dict[tuple[str, int], tuple[Encoding, Encoding, int]] = {("float", 4): ("u8", "e2m1", 2)}
_WORDS: dict[tuple[str, int], tuple[Encoding, Encoding, int]] = {
    ("int", 4): ("i32", "u4", 8),
    ("int", 8): ("i32", "u8", 4),
}
FORMATS = {
    "float-quantized": Format(_FP8, ("tensor", "channel", "block"), ".weight"),
    "int-quantized": Format(_INT8, ("tensor", "channel", "group"), ".weight"),
    "naive-quantized": Format(_FP8 | _INT8, ("tensor", "channel", "group", "block"), ".weight"),
    "pack-quantized": Format(_WORDS, ("channel", "group"), middle=True),
    "nvfp4-pack-quantized": Format(_FP4, ("tensor_group",), scales=("e4m3fn",), outer=True),
    "mxfp4-pack-quantized": Format(_FP4, ("group",), scales=("u8", "e8m0")),
}


@dataclass(frozen=True)
class CompressedTensors(Quantisation):
    """Attributes:
    format: a key of FORMATS.
    number: type and bits of codes.
    block: rows and columns of a matrix that share a scale; 0 means all of them.
    symmetric: codes have no zeros.
    ordered: the columns of a group are no neighbours.
    """

    METHOD: ClassVar[str] = "compressed-tensors"
    READ: ClassVar[Mapping[str, str]] = {r".+\.weight_shape": "the shape is that of the codes"}

    format: str = "float-quantized"
    number: tuple[str, int] = ("float", 8)
    block: Block = (0, 0)
    symmetric: bool = True
    ordered: bool = False

    @property
    def codes(self) -> str:
        return FORMATS[self.format].name

    @property
    def stored(self) -> tuple[Encoding, ...]:
        return (FORMATS[self.format].numbers[self.number][0],)

    def kind(self) -> QuantType:
        found = FORMATS[self.format]
        code = found.numbers[self.number][1]
        scale = "float32" if found.scales == FLOATS else found.scales[-1]
        zero = None if self.symmetric and not found.middle else "float16"
        middle = _middle(code) if found.middle and self.symmetric else zero
        return QuantType.get(code, scale, self.block, zero=middle, outer=found.outer, ordered=self.ordered)

    def join(self, parts: Parts) -> WeightRef:
        found, kind = FORMATS[self.format], self.kind()
        _, code, per_element = found.numbers[self.number]
        shape = parts.matrix(per_element)
        if per_element > 1 and (stated := parts.find(".weight_shape")) is not None:
            parts.check(stated, [(2,)], ("i64", "i32"), "a shape")
            if tuple(parts.read(stated).tolist()) != shape:
                raise parts.refuse(f"{parts.read(stated).tolist()} codes do not fill the words, {list(shape)} would")
        parts.fits(kind, shape)
        scale = parts.need(".weight_scale")
        parts.scale(scale, kind, shape, found.scales)
        if scale.encoding == "u8":
            scale = replace(scale, encoding="e8m0")
        outer = parts.need(".weight_global_scale") if found.outer else None
        if outer is not None:
            parts.check(outer, [(1,), ()], ("float32",), "a scale of scales")
            outer = replace(outer, reciprocal=True)
        return replace(
            parts.codes,
            encoding=code,
            shape=shape,
            scale=scale,
            block=self.block,
            zero=self._zero(parts, kind, shape, code),
            outer=outer,
            group_of=self._order(parts, kind, shape),
        )

    def _zero(self, parts: Parts, kind: QuantType, shape: tuple[int, int], code: Encoding) -> WeightRef | int | None:
        if self.symmetric:
            return kind.zero_point
        zero, (rows, columns) = parts.need(".weight_zero_point"), kind.scale_shape(shape)
        if not FORMATS[self.format].middle:
            parts.scale(zero, kind, shape, ("i8",))
            return zero
        words = 8 if code == "u4" else 4
        if rows % words:
            raise parts.refuse(f"the zeros of {rows} rows do not fill int32 words")
        parts.check(zero, [(rows // words, columns)], ("i32",), "the tensor of zeros")
        return replace(zero, encoding=code, shape=(rows, columns), packing="down")

    def _order(self, parts: Parts, kind: QuantType, shape: tuple[int, int]) -> WeightRef | None:
        if not self.ordered:
            return None
        order = parts.need(".weight_g_idx")
        parts.check(order, [shape[1:]], ("i32",), "the group of each column")
        return order


def _middle(code: str) -> int:
    return 8 if code == "u4" else 128


def read(reader: ConfigReader) -> CompressedTensors:
    """The keys of `quant_method` compressed-tensors."""
    form = reader.get("format", str)
    if form not in FORMATS:
        raise refuse(reader, "format", form, tuple(FORMATS))
    groups = reader.raw("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise reader.error("config-type", f"'config_groups' is {groups!r:.100}, expected an object of groups")
    if len(groups) != 1:
        raise refuse(reader, "config_groups", counted(len(groups), "group"), ("one group",))
    ((name, data),) = groups.items()
    at = f"{reader.source}: {name}"
    fixed = {"targets": (["Linear"],), "output_activations": (None,), "format": (None, form)}
    group = ConfigReader(data, at, no_effect=(), fixed=fixed)
    parts = {key: group.raw(key) for key in ("weights", "input_activations")}
    group.finish()
    for key, part in parts.items():
        if not (isinstance(part, dict) or (part is None and key == "input_activations")):
            raise group.error("config-type", f"{key!r} is {part!r:.100}, expected an object")
    found = _weights(ConfigReader(parts["weights"], f"{at}: weights", no_effect=_OBSERVERS, fixed=_WEIGHT_FIXED), form)
    activations = parts["input_activations"]
    return replace(
        found,
        skipped=names(reader, "ignore"),
        static=activations is not None
        and _static(ConfigReader(activations, f"{at}: input_activations", **_ACTIVATIONS)),
    )


def _weights(reader: ConfigReader, form: str) -> CompressedTensors:
    found = FORMATS[form]
    kind, width = reader.get("type", str), reader.get("num_bits", int)
    for key, value, index in (("type", kind, 0), ("num_bits", width, 1)):
        allowed = {number[index] for number in found.numbers}
        if value not in allowed:
            raise refuse(reader, key, value, sorted(allowed))
    strategy, structure, size = reader.get("strategy", str), reader.raw("block_structure"), reader.raw("group_size")
    if strategy not in found.strategies:
        raise refuse(reader, "strategy", strategy, found.strategies)
    if structure is not None and strategy != "block":
        raise reader.error("config-conflict", f"'block_structure' is {structure!r:.100} and the strategy {strategy}")
    if (type(size) is int and size > 0) != ("group" in strategy):
        raise reader.error("config-conflict", f"'group_size' is {size!r:.100} and the strategy {strategy}")
    blocks: dict[str, Callable[[], Block]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "block": lambda: block_of(reader, "block_structure", structure),
        "group": lambda: (1, size),
        "tensor_group": lambda: (1, size),
    }
    order = reader.raw("actorder")
    if not isinstance(order, str | bool | None) or order not in _ORDERS:
        raise refuse(reader, "actorder", order, [name for name in _ORDERS if name])
    if _ORDERS[order] and strategy != "group":
        raise reader.error("config-conflict", f"'actorder' is {order!r} and the strategy {strategy}")
    symmetric = reader.get("symmetric", bool)
    if not symmetric and kind == "float":
        raise refuse(reader, "symmetric", symmetric, (True,))
    reader.finish()
    return CompressedTensors(
        format=form,
        number=(kind, width),
        block=blocks[strategy](),
        symmetric=symmetric,
        ordered=_ORDERS[order],
    )


def _static(reader: ConfigReader) -> bool:
    dynamic = reader.raw("dynamic")
    if dynamic not in (True, False, None, "local"):
        raise refuse(reader, "dynamic", dynamic, (True, False, "local"))
    reader.finish()
    return dynamic is not True


#: Whether the columns of a group are no neighbours. `weight` and `static` only say how codes were found.
_ORDERS: dict[Any, bool] = {None: False, False: False, "weight": False, "static": False, "group": True, "dynamic": True}
_OBSERVERS = {
    "observer": _STATISTICS,
    "observer_kwargs": _STATISTICS,
    "scale_dtype": "the tensor itself says it",
    "zp_dtype": "the tensor itself says it",
}
_WEIGHT_FIXED: dict[str, tuple[Any, ...]] = {"dynamic": (False,)}
_ACTIVATIONS: dict[str, Any] = {
    "no_effect": dict.fromkeys(
        (*_OBSERVERS, "actorder", "block_structure", "group_size", "strategy", "symmetric"), UNQUANTISED
    ),
    "fixed": {"num_bits": (8, 4), "type": ("float", "int")},
}

NO_EFFECT = {"global_compression_ratio": _STATISTICS, "version": "of the writer"}
FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed", "frozen"),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None,),
    "transform_config": (None, {}),
}
