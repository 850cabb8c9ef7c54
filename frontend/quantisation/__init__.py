"""`quantization_config` of a config.json, read without forgiving anything, and scales joined to the weights they scale.

One file for each method. Checkpoints whose activations are quantised too are computed with activations as they are:
exactly what their dequantised weights say.
"""

from __future__ import annotations

from types import ModuleType

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from plait.frontend.quantisation.base import Quantisation
from plait.frontend.quantisation.join import join_scales

__all__ = ["METHODS", "Quantisation", "join_scales", "read_quantisation"]

METHODS: dict[str, ModuleType] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}
"""`quant_method` -> a file with `read`, `NO_EFFECT` (keys without effect, with the reason) and `FIXED` (keys with the
values that are implemented)."""


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
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            "config-value",
            f"{reader.source}: 'quantization_config' is method {method!r:.100}, which is not implemented",
            why=f"implemented: {', '.join(METHODS)}",
            hint="use the unquantised checkpoint, or a GGUF file",
        )
    file = METHODS[method]
    inner = ConfigReader(data, source, no_effect=file.NO_EFFECT, fixed=file.FIXED)
    inner.raw("quant_method")
    found = file.read(inner)
    assert isinstance(found, Quantisation)
    inner.finish()
    return found
