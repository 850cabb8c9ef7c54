"""A mixture of experts to launches."""

from __future__ import annotations

from plait.backends.kernels.gpu.draft import LOWERING, Constants, Draft, Emit, Place, Places, Scalars, View, null, user
from plait.backends.kernels.gpu.gemm import even_k
from plait.backends.kernels.gpu.product import product, stack, values
from plait.backends.kernels.lowering import operand_dtype, refuse, weight_name
from plait.ir.ops import ExpertsOp, RouterOp
from plait.ir.ops.base import number, tensor_type

_SCORING = ("softmax", "sigmoid")
_GROUP_SCORES = ("max", "top2")
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")


@LOWERING.emits(
    RouterOp,
    *("experts_per_token", "scoring", "normalise", "scale", "selection_bias"),
    *("groups", "groups_per_token", "group_score"),
)
def _router(op: RouterOp) -> Emit:
    given = [value for value in (op.weight, op.bias, op.selection_bias) if value is not None]
    for value in given:
        weight_name(op, value)
    operand_dtype(op, op.x)
    if op.scoring.data not in _SCORING:
        raise refuse(op, "scoring", op.scoring.data, "implemented are " + ", ".join(_SCORING))
    if op.group_score is not None and op.group_score.data not in _GROUP_SCORES:
        raise refuse(op, "group_score", op.group_score.data, "implemented are " + ", ".join(_GROUP_SCORES))
    return lambda d: _route(d, op)


def _route(d: Draft, op: RouterOp) -> None:
    experts, top = tensor_type(op.weight, "the weight", 2).get_shape()[0], op.experts_per_token.value.data
    scores = d.activation(experts, "fp32")
    product(d, d.view(op.x), [op.weight], [] if op.bias is None else [op.bias], scores)
    dense = not _only_choices(op)
    if dense:
        ends: dict[str, View | Place] = {"out": d.make(op.result), "choices": null("i32"), "shares": null("fp32")}
    else:
        d.beside[op.result] = d.activation(top, "i32"), d.activation(top, "fp32")
        ends = {"out": null("fp32"), **dict(zip(("choices", "shares"), d.beside[op.result], strict=True))}
    selection = op.selection_bias
    places: Places = {
        "scores": scores,
        "selection_bias": null("fp32") if selection is None else d.weight(values([selection], "float32")),
        **ends,
    }
    scalars: Scalars = {
        "rows": "T",
        "scores_stride": scores.stride,
        "least": number(op.normalise) or 0.0,
        "scale": 1.0 if op.scale is None else op.scale.value.data,
    }
    constants: Constants = {
        "EXPERTS": experts,
        "TOP": top,
        "SCORING": op.scoring.data,
        "NORMALISE": op.normalise is not None,
        "HAS_SELECTION": selection is not None,
        "GROUPS": number(op.groups) or 1,
        "TOP_GROUPS": number(op.groups_per_token) or 1,
        "GROUP_SCORE": "max" if op.group_score is None else op.group_score.data,
        "DENSE": dense,
    }
    d.launch("route", places, scalars, constants)


def _only_choices(op: RouterOp) -> bool:
    """Whether the experts of as many per token are all that reads the result: they need no zeros."""
    reader = user(op.result)
    return isinstance(reader, ExpertsOp) and reader.experts_per_token == op.experts_per_token


@LOWERING.emits(ExpertsOp, "experts_per_token", "activation", "alpha", "limit", "gate_bias", "up_bias", "down_bias")
def _experts(op: ExpertsOp) -> Emit:
    for value in (*op.stacks, *op.biases):
        weight_name(op, value)
    operand_dtype(op, op.x)
    if op.activation.data not in _ACTIVATIONS:
        raise refuse(op, "activation", op.activation.data, "implemented are " + ", ".join(_ACTIVATIONS))
    return lambda d: _Experts(d, op).emit()


class _Experts:
    """The launches of one mixture: pairs in the order of experts, two products, the sum over a token's experts."""

    def __init__(self, d: Draft, op: ExpertsOp) -> None:
        self.d, self.op = d, op
        self.dtype = operand_dtype(op, op.x)
        self.experts, self.inner, self.hidden = tensor_type(op.gate, "gate", 3).get_shape()
        self.top = op.experts_per_token.value.data
        self.constants: Constants = {"EXPERTS": self.experts, "TOP": self.top}

    def emit(self) -> None:
        d, op = self.d, self.op
        choices, shares = d.beside[op.routing] if op.routing in d.beside else self.choose()
        pairs, places = d.activation(self.top, "i32"), d.activation(self.top, "i32")
        counts = d.activation(self.experts, "i32", "1")
        ordered: Places = {"choices": choices, "counts": counts, "pairs": pairs, "places": places}
        d.launch("sort_pairs", ordered, {"count": f"T * {self.top}"}, self.constants)
        x, pair_rows = d.view(op.x), f"T * {self.top}"
        inner, parts = (d.activation(width, x.type, pair_rows) for width in (self.inner, self.hidden))
        chosen: Places = {"pairs": pairs, "counts": counts, "shares": shares}
        numbers = {name: number(getattr(op, name)) or 0.0 for name in ("alpha", "limit")}
        act: Constants = {"ACTIVATION": op.activation.data, "ALPHA": numbers["alpha"], "LIMIT": numbers["limit"]}
        self.multiply("experts_gated", slice(0, 2), x, inner, chosen, act)
        self.multiply("experts_down", slice(2, 3), inner, parts, chosen, {})
        out = d.make(op.result)
        ends: Places = {"parts": parts, "choices": choices, "places": places, "out": out}
        strides = {"parts_stride": parts.stride, "out_stride": out.stride}
        d.launch("experts_sum", ends, {"rows": "T", "H": self.hidden, **strides}, self.constants)

    def choose(self) -> tuple[View, View]:
        """From the routing as the IR has it."""
        d, routing = self.d, self.d.view(self.op.routing)
        choices, shares = d.activation(self.top, "i32"), d.activation(self.top, "fp32")
        places: Places = {"routing": routing, "choices": choices, "shares": shares}
        d.launch("choose", places, {"rows": "T", "routing_stride": routing.stride}, self.constants)
        return choices, shares

    def multiply(self, kernel: str, which: slice, x: View, out: View, chosen: Places, constants: Constants) -> None:
        """A product with some of the op's stacks, one expert behind the other."""
        d, biases = self.d, self.op.biases[which]
        matrices, format = stack(d, list(self.op.stacks)[which], self.dtype)
        bias = d.weight(values(biases, self.dtype)) if biases else null(x.type)
        places: Places = {**chosen, **matrices, "bias": bias, "x": x, "out": out}
        scalars: Scalars = {
            "rows": "T",
            "N": out.width,
            "K": x.width,
            "x_stride": x.stride,
            "out_stride": out.stride,
        }
        flags: Constants = {"HAS_BIAS": bool(biases), "EVEN_K": even_k(x.width)}
        d.launch(kernel, places, scalars, {**self.constants, **constants, **format, **flags})
