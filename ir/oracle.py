"""The NumPy oracle: the exact meaning of a module, slow and plain. Everything else is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import DYNAMIC_INDEX, ModuleOp, TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import SSAValue

from plait.ir.module import main, signature
from plait.ir.numbers import Packed, Quantised, round_to
from plait.ir.ops import BatchFacts, OracleKV, PlaitOp, WeightOp
from plait.ir.ops.base import Float64
from plait.ir.types import KVType, Quant, Tensor
from plait.spec import kv_class


class Oracle:
    """Runs a module step by step, with its KV pages kept between steps.

    Args:
        module: a whole model or one slice.
        weights: tensors by name: any float dtype, rounded to the types that the module says; `Quantised` or `Packed`
            where it says a quantised one.
        pages: pages per KV class (`plait.spec.kv_class`).
        page_tokens: tokens of one page.
    """

    def __init__(
        self,
        module: ModuleOp,
        weights: Mapping[str, NDArray[Any] | Quantised | Packed],
        pages: Mapping[str, int],
        page_tokens: int,
    ) -> None:
        self._module = module
        self._weights = weights
        self._signature = signature(module)
        self.kv: dict[str, OracleKV] = {}
        for name, value in self._signature.kv.items():
            kind = value.type
            assert isinstance(kind, KVType)
            count = pages[kv_class(kind.window_tokens)]
            self.kv[name] = OracleKV(
                count, page_tokens, kind.kv_heads.data, kind.head_dim.data, 0 if kind.is_latent else None
            )

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
                results: tuple[Float64, ...] = (self._weight(op),)
            else:
                results = op.oracle(*(env[operand] for operand in op.operands))
            for result, value in zip(op.results, results, strict=True):
                kind = result.type
                assert isinstance(kind, TensorType)
                _check_shape(value, kind, op.name)
                quantised = isinstance(kind.element_type, Quant)
                env[result] = value if quantised else round_to(value, kind.element_type)
        return {name: env[value] for name, value in self._signature.outputs.items()}

    def _weight(self, op: WeightOp) -> Float64:
        found, kind = self._weights[op.symbol.data], op.result.type
        assert isinstance(kind, TensorType)
        if isinstance(kind.element_type, Quant):
            assert isinstance(found, Quantised | Packed), f"{op.symbol.data} is {kind}"
            assert found.kind == kind.element_type, f"{op.symbol.data} is {kind}"
            return found.values()
        return np.asarray(found, np.float64)


def _check_shape(values: Float64, kind: Tensor, what: str) -> None:
    """NumPy would broadcast a wrong shape in silence."""
    fits = len(values.shape) == len(kind.get_shape())
    fits = fits and all(want in (DYNAMIC_INDEX, got) for want, got in zip(kind.get_shape(), values.shape, strict=True))
    assert fits, f"{what}: shape {values.shape} is not {kind}"
