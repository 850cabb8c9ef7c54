"""The NumPy oracle: the exact meaning of a module, slow and plain. Everything else is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import DYNAMIC_INDEX, ModuleOp, TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, SSAValue

from plait.ir.module import main, signature
from plait.ir.ops import BatchFacts, OracleKV, PlaitOp, WeightOp
from plait.ir.ops.base import Float64
from plait.ir.types import KVType, Tensor, dtype_name
from plait.spec import kv_class

_NUMPY: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def round_to(values: Float64, kind: Attribute) -> Float64:
    """float64 values rounded to nearest even to an element type, kept as float64."""
    return np.asarray(values, np.float64).astype(_NUMPY[dtype_name(kind)]).astype(np.float64)


class Oracle:
    """Runs a module step by step, with its KV pages kept between steps.

    Args:
        module: a whole model or one slice.
        weights: tensors by name, any float dtype; rounded to the types that the module says.
        pages: pages per KV class (`plait.spec.kv_class`).
        page_tokens: tokens of one page.
    """

    def __init__(
        self, module: ModuleOp, weights: Mapping[str, NDArray[Any]], pages: Mapping[str, int], page_tokens: int
    ) -> None:
        self._module = module
        self._weights = weights
        self._signature = signature(module)
        self.kv: dict[str, OracleKV] = {}
        for name, value in self._signature.kv.items():
            kind = value.type
            assert isinstance(kind, KVType)
            count = pages[kv_class(kind.window_tokens)]
            self.kv[name] = OracleKV(count, page_tokens, kind.kv_heads.data, kind.head_dim.data)

    def step(self, batch: BatchFacts, inputs: Mapping[str, NDArray[Any]] | None = None) -> dict[str, Float64]:
        """One batch. Inputs and outputs are the boundary tensors by name, in float64."""
        given = {name: np.asarray((inputs or {})[name], np.float64) for name in self._signature.inputs}
        env: dict[SSAValue, Any] = {self._signature.batch: batch}
        for name, arg in self._signature.inputs.items():
            assert isinstance(arg.type, TensorType)
            _check_shape(given[name], arg.type, name)
            env[arg] = given[name]
        env |= {arg: self.kv[name] for name, arg in self._signature.kv.items()}
        for op in main(self._module).body.block.ops:
            if isinstance(op, ReturnOp):
                break
            assert isinstance(op, PlaitOp), f"{op.name} is not an op of the dialect"
            if isinstance(op, WeightOp):
                results: tuple[Float64, ...] = (np.asarray(self._weights[op.symbol.data], np.float64),)
            else:
                results = op.oracle(*(env[operand] for operand in op.operands))
            for result, value in zip(op.results, results, strict=True):
                kind = result.type
                assert isinstance(kind, TensorType)
                _check_shape(value, kind, op.name)
                env[result] = round_to(value, kind.element_type)
        return {name: env[value] for name, value in self._signature.outputs.items()}


def _check_shape(values: Float64, kind: Tensor, what: str) -> None:
    """NumPy would broadcast a wrong shape in silence."""
    fits = len(values.shape) == len(kind.get_shape())
    fits = fits and all(want in (DYNAMIC_INDEX, got) for want, got in zip(kind.get_shape(), values.shape, strict=True))
    assert fits, f"{what}: shape {values.shape} is not {kind}"
