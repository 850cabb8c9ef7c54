"""`quantization_config` of a config.json, read without forgiving anything, and scales joined to the weights they scale.

Read are FP8 weights (e4m3fn) with a scale for each tensor, row or block. Checkpoints whose activations are quantised
too are computed with activations as they are: exactly what their dequantised weights say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.files import some
from plait.ir.types import DTYPES, FP8, QuantType
from plait.spec import WeightRef

_UNQUANTISED = "plait does not quantise activations"
_STATISTICS = "says how scales were found"

SCHEMES = ("dynamic", "static")
STATIC_SCALES = {r".+\.input_scale": f"the scale of quantised activations; {_UNQUANTISED}"}
"""Tensors that a checkpoint with static activation scales holds beside its weights, with the reason they are unused."""


@dataclass(frozen=True)
class Quantisation:
    """What a config says of quantised weights.

    Attributes:
        block: rows and columns of a matrix that share a scale; 0 means all of them.
        scales: what follows a module's name in the name of its scale: the first that is there.
        skipped: modules that are not quantised: names, with all below them, or `re:` and a regular expression.
        static: there are scales of activations too.
    """

    method: str
    block: tuple[int, int]
    scales: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    static: bool = False

    def skips(self, module: str) -> bool:
        """Whether `model.layers.0.mlp.up_proj` is listed as not quantised."""
        return any(
            re.match(name[3:], module) is not None
            if name.startswith("re:")
            else module == name or module.startswith(f"{name}.")
            for name in self.skipped
        )

    def type_of(self, scale_dtype: str = "float32") -> QuantType:
        return QuantType.get("e4m3fn", scale_dtype, self.block)


def read_quantisation(reader: ConfigReader) -> Quantisation | None:
    """What the key `quantization_config` says; None where it is absent or null.

    Raises:
        UnsupportedError: the method, a key of it or a value is not implemented, by name.
        CheckpointError: a value is of the wrong type.
    """
    data = reader.raw("quantization_config")
    if data is None:
        return None
    source = f"{reader.source}: quantization_config"
    if not isinstance(data, dict):
        raise CheckpointError("config-type", f"{source} is {data!r:.100}, expected an object")
    method = data.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedError(
            "config-value",
            f"{reader.source}: 'quantization_config' is method {method!r:.100}, which is not implemented",
            why=f"implemented: {', '.join(_METHODS)}",
            hint="use the unquantised checkpoint, or a GGUF file in Q4_0, Q4_1 or Q8_0",
        )
    read, no_effect, fixed = _METHODS[method]
    inner = ConfigReader(data, source, no_effect=no_effect, fixed=fixed)
    inner.raw("quant_method")
    found = read(inner)
    inner.finish()
    return found


def join_scales(
    weights: Mapping[str, WeightRef], quantisation: Quantisation | None, source: Path
) -> dict[str, WeightRef]:
    """The tensors with each scale inside the weight it scales, and no longer a tensor of its own.

    Raises:
        UnsupportedError: `dtype-unsupported`: FP8 that no config explains.
        CheckpointError: `scale-missing`, `scale-shape`, `quantisation-conflict`, naming the tensor.
    """
    coded = [ref for ref in weights.values() if ref.encoding in FP8]
    if quantisation is None:
        if coded:
            raise UnsupportedError(
                "dtype-unsupported",
                f"{source}: {coded[0].name!r} is stored as FP8",
                why="FP8 weights mean nothing without their scales, and no quantization_config says where those are",
            )
        return dict(weights)
    if not coded:
        raise CheckpointError(
            "quantisation-conflict",
            f"the config of {source} says its weights are quantised ({quantisation.method}), and none is",
            why="no tensor is stored as F8_E4M3",
            hint="does the config belong to these weights?",
        )
    joined = {ref.name: _joined(ref, weights, quantisation, source) for ref in coded}
    used = {ref.scale.name for ref in joined.values() if ref.scale is not None}
    return {name: joined.get(name, ref) for name, ref in weights.items() if name not in used}


def _joined(ref: WeightRef, weights: Mapping[str, WeightRef], quantisation: Quantisation, source: Path) -> WeightRef:
    module, kind = ref.name.removesuffix(".weight"), quantisation.type_of()
    problem = kind.problem(ref.shape)
    if ref.encoding != "e4m3fn" or problem or module == ref.name:
        raise UnsupportedError(
            "dtype-unsupported",
            f"{source}: {ref.name!r} is stored as FP8 ({ref.encoding}) of {list(ref.shape)}",
            why=problem or f"{quantisation.method} weights are matrices called *.weight, in e4m3fn",
        )
    if quantisation.skips(module):
        raise CheckpointError(
            "quantisation-conflict",
            f"{source}: {ref.name!r} is stored as FP8, and the config lists {module} as not quantised",
        )
    names = [f"{module}.{suffix}" for suffix in quantisation.scales]
    found = [weights[name] for name in names if name in weights]
    if len(found) != 1:
        raise CheckpointError(
            "scale-missing" if not found else "quantisation-conflict",
            f"{source}: {ref.name!r} is stored as FP8 and has {'no scale' if not found else 'two scales'}",
            why=f"looked for {' and '.join(map(repr, names))}",
            hint="" if found else "fetch the whole checkpoint again",
        )
    (scale,) = found
    rows, columns = kind.scale_shape(ref.shape)
    shapes = {(0, 0): [(), (1,), (1, 1)], (1, 0): [(rows, 1), (rows,)]}.get(quantisation.block, [(rows, columns)])
    if scale.shape not in shapes or scale.encoding not in DTYPES:
        raise CheckpointError(
            "scale-shape",
            f"{source}: {scale.name!r} is {scale.encoding} of {list(scale.shape)}",
            why=f"the scale of {list(ref.shape)}, {_layout(quantisation.block)}, is {list(shapes[0])} of a float dtype",
            hint="does the config belong to these weights?",
        )
    return replace(ref, scale=scale, block=quantisation.block)


def _layout(block: tuple[int, int]) -> str:
    words = {(0, 0): "one for the tensor", (1, 0): "one for each row"}
    return words.get(block, f"one for each block of {block[0]} x {block[1]}")


def _fp8(reader: ConfigReader) -> Quantisation:
    """DeepSeek's block scales (`weight_scale_inv`, a factor in spite of its name), or one scale for each tensor."""
    scheme = reader.optional("activation_scheme", str) or "dynamic"
    if scheme not in SCHEMES:
        raise _refuse(reader, "activation_scheme", scheme, SCHEMES)
    size = reader.raw("weight_block_size")
    skipped = {key: _names(reader, key) for key in ("modules_to_not_convert", "ignored_layers")}
    if all(skipped.values()) and len(set(skipped.values())) > 1:
        raise reader.error("config-conflict", f"{' and '.join(skipped)} differ")
    return Quantisation(
        "fp8",
        (0, 0) if size is None else _block(reader, "weight_block_size", size),
        ("weight_scale_inv", "weight_scale"),
        skipped["modules_to_not_convert"] or skipped["ignored_layers"],
        scheme == "static",
    )


def _compressed(reader: ConfigReader) -> Quantisation:
    """compressed-tensors, one group of all linears in `float-quantized`."""
    groups = reader.raw("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise reader.error("config-type", f"'config_groups' is {groups!r:.100}, expected an object of groups")
    if len(groups) != 1:
        raise _refuse(reader, "config_groups", f"{len(groups)} groups", ("one group",))
    ((name, data),) = groups.items()
    at = f"{reader.source}: {name}"
    group = ConfigReader(data, at, no_effect=(), fixed=_GROUP_FIXED)
    parts = {key: group.raw(key) for key in ("weights", "input_activations")}
    group.finish()
    for key, part in parts.items():
        if not (isinstance(part, dict) or (part is None and key == "input_activations")):
            raise group.error("config-type", f"{key!r} is {part!r:.100}, expected an object")
    weights = ConfigReader(parts["weights"], f"{at}: weights", no_effect=_OBSERVERS, fixed=_WEIGHT_FIXED)
    strategy, structure = weights.get("strategy", str), weights.raw("block_structure")
    blocks: dict[str, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "block": lambda: _block(weights, "block_structure", structure),
    }
    if strategy not in blocks:
        raise _refuse(weights, "strategy", strategy, tuple(blocks))
    if structure is not None and strategy != "block":
        raise weights.error("config-conflict", f"'block_structure' is {structure!r:.100} and the strategy {strategy}")
    block = blocks[strategy]()
    weights.finish()
    static = False
    if parts["input_activations"] is not None:
        activations = ConfigReader(
            parts["input_activations"], f"{at}: input_activations", no_effect=_ACTIVATIONS, fixed=_ACTIVATION_FIXED
        )
        static = not activations.flag("dynamic")
        activations.finish()
    return Quantisation("compressed-tensors", block, ("weight_scale",), _names(reader, "ignore"), static)


def _block(reader: ConfigReader, key: str, value: Any) -> tuple[int, int]:
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not whole:
        raise reader.error("config-value", f"{key!r} is {value!r:.100}, expected [rows, columns]")
    return value[0], value[1]


def _names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    value = reader.raw(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise reader.error("config-type", f"{key!r} is {value!r:.100}, expected a list of module names")
    for name in value:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as err:
                raise reader.error("config-value", f"{key!r} holds {name!r:.100}", why=str(err)) from err
    return tuple(value)


def _refuse(reader: ConfigReader, key: str, value: str, allowed: tuple[str, ...]) -> UnsupportedError:
    return UnsupportedError(
        "config-value",
        f"{reader.source}: {key!r} is {value!r:.100}, which is not implemented",
        why=f"implemented: {some(allowed)}",
    )


_OBSERVERS = {"observer": _STATISTICS, "observer_kwargs": _STATISTICS, "scale_dtype": "the tensor itself says it"}
_ACTIVATIONS = dict.fromkeys(
    (*_OBSERVERS, "actorder", "block_structure", "group_size", "strategy", "symmetric", "zp_dtype"), _UNQUANTISED
)
_ACTIVATION_FIXED: dict[str, tuple[Any, ...]] = {"num_bits": (8,), "type": ("float",)}
_WEIGHT_FIXED: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "dynamic": (False,),
    "group_size": (None,),
    "actorder": (None,),
    "zp_dtype": (None,),
}
_GROUP_FIXED: dict[str, tuple[Any, ...]] = {
    "targets": (["Linear"],),
    "output_activations": (None,),
    "format": (None, "float-quantized"),
}

#: Method -> reader, keys without effect with the reason, keys with the values that are implemented.
_METHODS: dict[str, tuple[Callable[[ConfigReader], Quantisation], Mapping[str, str], Mapping[str, tuple[Any, ...]]]] = {
    "fp8": (
        _fp8,
        {"dequantize": "how transformers holds them", "scale_fmt": "of activations; that of weights is stored"},
        {
            "fmt": ("e4m3", None),
            "modules_to_convert": (None,),
            "expert_dtype": ("fp8", None),
            "kv_cache_scheme": (None,),
        },
    ),
    "compressed-tensors": (
        _compressed,
        {"global_compression_ratio": _STATISTICS, "version": "of the writer"},
        {
            "format": ("float-quantized",),
            "quantization_status": ("compressed", "frozen"),
            "kv_cache_scheme": (None,),
            "sparsity_config": (None, {}),
            "transform_config": (None, {}),
        },
    ),
}
