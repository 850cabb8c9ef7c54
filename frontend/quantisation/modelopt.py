"""NVIDIA's ModelOpt: FP8 with one scale for each tensor, or NVFP4; from config.json or hf_quant_config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from plait.errors import CheckpointError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.files import read_json
from plait.frontend.quantisation.base import Block, Parts, Quantisation, names, refuse
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

FILE = "hf_quant_config.json"
"""What older exports say it in, beside a config.json that says nothing of quantisation."""

GROUP = 16
"""Codes that share a scale in NVFP4."""

ALGORITHMS: dict[str, tuple[Encoding, int]] = {"FP8": ("e4m3fn", 8), "NVFP4": ("u8", 4)}
"""What codes are stored as, and their bits."""


@dataclass(frozen=True)
class ModelOpt(Quantisation):
    """Attributes:
    algorithm: a key of ALGORITHMS.
    """

    METHOD: ClassVar[str] = "modelopt"

    algorithm: str = "FP8"

    @property
    def stored(self) -> tuple[Encoding, ...]:
        return (ALGORITHMS[self.algorithm][0],)

    @property
    def block(self) -> Block:
        return (0, 0) if self.algorithm == "FP8" else (1, GROUP)

    def kind(self) -> QuantType:
        if self.algorithm == "FP8":
            return QuantType.get("e4m3fn")
        return QuantType.get("e2m1", "e4m3fn", self.block, outer=True)

    def join(self, parts: Parts) -> WeightRef:
        kind, packed = self.kind(), self.algorithm == "NVFP4"
        shape = parts.matrix(2 if packed else 1)
        parts.fits(kind, shape)
        scale = parts.need(".weight_scale")
        parts.scale(scale, kind, shape, ("e4m3fn",) if packed else ("float32", "float16", "bfloat16"))
        codes = replace(parts.codes, shape=shape, scale=scale, block=self.block)
        if not packed:
            return codes
        outer = parts.need(".weight_scale_2")
        parts.check(outer, [(), (1,)], ("float32",), "a scale of scales")
        return replace(codes, encoding="e2m1", outer=outer)


def read(reader: ConfigReader) -> ModelOpt:
    """The keys of `quant_method` modelopt, as in config.json."""
    algorithm = reader.get("quant_algo", str)
    if algorithm not in ALGORITHMS:
        raise refuse(reader, "quant_algo", algorithm, tuple(ALGORITHMS))
    _check_groups(reader, algorithm)
    size = reader.optional("group_size", int)
    if algorithm == "NVFP4" and size not in (None, GROUP):
        raise refuse(reader, "group_size", size, (GROUP,))
    return ModelOpt(skipped=names(reader, "ignore", "exclude_modules"), static=True, algorithm=algorithm)


def _check_groups(reader: ConfigReader, algorithm: str) -> None:
    """`config_groups` says what `quant_algo` says, or is refused."""
    groups = reader.raw("config_groups")
    if groups is None:
        return
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise reader.error("config-type", f"'config_groups' is {groups!r:.100}, expected an object of groups")
    for name, data in groups.items():
        at = f"{reader.source}: {name}"
        group = ConfigReader(data, at, no_effect={"input_activations": ""}, fixed={"targets": (["Linear"],)})
        weights = group.raw("weights")
        group.finish()
        if not isinstance(weights, dict):
            raise group.error("config-type", f"'weights' is {weights!r:.100}, expected an object")
        fixed: dict[str, tuple[Any, ...]] = {
            "num_bits": (ALGORITHMS[algorithm][1],),
            "type": ("float",),
            "dynamic": (False,),
            "group_size": (GROUP,) if algorithm == "NVFP4" else (None,),
            "strategy": ("tensor", None) if algorithm == "FP8" else ("tensor_group", "group", None),
            "symmetric": (True, None),
        }
        ConfigReader(weights, f"{at}: weights", no_effect=(), fixed=fixed).finish()


def from_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with what hf_quant_config.json beside it says, where there is one.

    Raises:
        CheckpointError: `config-type`, `config-conflict`, naming the file.
    """
    path = folder / FILE
    if not path.is_file():
        return config
    found = read_json(path)
    said = found.pop("quantization", None)
    if not isinstance(said, dict):
        raise CheckpointError("config-type", f"{path}: 'quantization' is {said!r:.100}, expected an object")
    known = config.get("quantization_config")
    if known is not None:
        same = isinstance(known, dict) and known.get("quant_algo") == said.get("quant_algo")
        if not same:
            raise CheckpointError(
                "config-conflict",
                f"{path} and config.json say something else of quantisation",
                why=f"one says quant_algo {said.get('quant_algo')!r:.100}",
            )
        return config
    return config | {"quantization_config": {"quant_method": ModelOpt.METHOD, **found, **said}}


NO_EFFECT = {"producer": "of the writer", "version": "of the writer"}
FIXED: dict[str, tuple[Any, ...]] = {
    "kv_cache_scheme": (None,),
    "kv_cache_quant_algo": (None,),
    "quantized_layers": (None, {}),
}
