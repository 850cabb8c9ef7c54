"""A slice's module to its launch plan. `LOWERING` says which ops with which attributes there are kernels for.

An emitter checks its op and returns what writes the launches; that runs with the ops in their order and settles what is
fused: linears of one input are one product whose results are strided views; gate, up and the activation are one
product; a residual add goes into the product before it; both rotary embeddings and the KV write are one launch.
Whatever is cut off a model keeps its arithmetic, since no fusion crosses a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu import arena
from plait.backends.kernels.gpu.kernel import Constant, Kernel
from plait.backends.kernels.gpu.launch import (
    ELEMENT_BYTES,
    TYPES,
    Activation,
    Binary,
    Bounds,
    Choice,
    Fact,
    LaunchPlan,
    Pages,
    Pointer,
    Step,
    Value,
    Weight,
)
from plait.backends.kernels.gpu.table import KERNELS
from plait.backends.kernels.lowering import Lowering, attribute_dtype, op_name, operand_dtype, refuse, rope_of
from plait.backends.kernels.lowering import weight_name as _weight_name
from plait.errors import UnsupportedError
from plait.ir import kv_layouts, signature
from plait.ir.module import ops
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    GeluMulOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.types import FP8, dtype_name
from plait.spec import kv_class

#: How the keys of a decode sequence are divided: at least so many to a part, at most so many parts. With 8 KV heads and
#: 8,192 keys a single sequence gives 256 programs, enough for any of the chips.
SPLIT_KEYS, MAX_SPLITS = 256, 32

#: The largest BLOCK_K of a tile (`gemm.EVEN_K`).
_LARGEST_BLOCK_K = 128

#: fp8 of `!plait.kv` as kernels call it.
FP8_TYPES = {"e4m3fn": "fp8e4nv", "e5m2": "fp8e5", "e4m3fnuz": "fp8e4b8"}


class Pick(Protocol):
    """Chooses how a kernel is compiled: binaries with the most rows they are for, ascending, None at the end."""

    def __call__(
        self,
        kernel: Kernel,
        types: Mapping[str, str],
        constants: Mapping[str, Constant],
        aligned: frozenset[str],
        scalars: Mapping[str, int | float | str],
    ) -> Sequence[tuple[Binary, int | None]]: ...


@dataclass(frozen=True)
class View:
    """Rows of `width` adjacent elements, `stride` apart, from `start` elements on in an activation."""

    buffer: str
    type: str
    width: int
    stride: int
    start: int = 0

    def columns(self, start: int, width: int) -> View:
        return replace(self, start=self.start + start, width=width)


@dataclass(frozen=True)
class Place:
    """What a pointer argument gets: a place, or null, and its element type."""

    pointer: Pointer | None
    type: str


Emit = Callable[["Draft"], None]

LOWERING: Lowering[Emit] = Lowering("the launch plan")


def lower(module: ModuleOp, target: str, options: CompileOptions, pick: Pick) -> LaunchPlan:
    """The launch plan of a slice for batches up to the bounds of `options`.

    Raises:
        UnsupportedError: naming the op and the attribute.
    """
    program = [(op, LOWERING.emit(op)) for op in ops(module)]
    _check_logits(module)
    draft = Draft(module, target, options, pick)
    for op, emit in program:
        draft.op = op
        if op not in draft.done:
            emit(draft)
    return draft.finish()


class Draft:
    """A launch plan in the making."""

    def __init__(self, module: ModuleOp, target: str, options: CompileOptions, pick: Pick) -> None:
        self.op: Operation
        #: Ops that a launch before them did already, and for which `add_rms_norm` the sum.
        self.done: set[Operation] = set()
        self._target, self._pick = target, pick
        self._bounds = Bounds(
            options.max_step_tokens,
            options.max_sequences,
            min(options.max_sequences, options.max_step_tokens),
            options.page_tokens,
        )
        self._signature = signature(module)
        self._layouts = kv_layouts(module, options.page_tokens)
        self._binaries: list[Binary] = []
        self._weights: dict[Weight, str] = {}
        self._facts: dict[Fact, str] = {}
        self._activations: dict[str, tuple[str, int, str]] = {}
        self._steps: list[Step] = []
        self._head: list[Step] = []
        self._values: dict[SSAValue, View] = {}
        for value in self._signature.inputs.values():
            self._values[value] = self.activation(width_of(value), type_of(value))

    @property
    def page_tokens(self) -> int:
        return self._bounds.page_tokens

    def view(self, value: SSAValue) -> View:
        return self._values[value]

    def knows(self, value: SSAValue) -> bool:
        """Whether a launch so far makes it."""
        return value in self._values

    def make(self, value: SSAValue, rows: str = "T") -> View:
        """A new activation for a result."""
        view = self.activation(width_of(value), type_of(value), rows)
        self._values[value] = view
        return view

    def set(self, value: SSAValue, view: View) -> None:
        self._values[value] = view

    def activation(self, width: int, type: str, rows: str = "T") -> View:
        name = f"a{len(self._activations)}"
        self._activations[name] = (rows, width, type)
        return View(name, type, width, width)

    def weight(self, values: Sequence[SSAValue]) -> Place:
        """Tensors of the checkpoint, stacked along their first dimension."""
        kinds = [tensor_of(value) for value in values]
        shapes = tuple(kind.get_shape() for kind in kinds)
        dtype = dtype_name(kinds[0].element_type)
        weight = Weight(tuple(_weight_name(self.op, value) for value in values), shapes, dtype)
        name = self._weights.setdefault(weight, f"w{len(self._weights)}")
        return Place(Pointer(name), TYPES[dtype])

    def fact(self, fact: Fact) -> Place:
        name = self._facts.setdefault(fact, f"{fact.kind}{len(self._facts)}")
        return Place(Pointer(name), fact.type)

    def pages(self, op: AttentionOp) -> tuple[Place, Place]:
        layer = list(self._signature.kv.values()).index(op.kv)  # type: ignore[arg-type]
        kind = FP8_TYPES.get(dtype_name(op.cache.dtype)) or TYPES[dtype_name(op.cache.dtype)]
        return Place(Pointer(f"k{layer}"), kind), Place(Pointer(f"v{layer}"), kind)

    def launch(
        self,
        name: str,
        pointers: Mapping[str, View | Place],
        scalars: Mapping[str, int | float | str],
        constants: Mapping[str, Constant],
        *,
        rows: str = "T",
        names: Mapping[str, str] | None = None,
        when: str = "1",
    ) -> None:
        """Append a launch."""
        kernel = KERNELS[name]
        picked = self.pick(name, pointers, scalars, constants)
        where = self._head if rows == "R" else self._steps
        where.append(
            Step(
                op=op_name(self.op),
                rows=rows,
                choices=tuple(Choice(self._binary(binary), most) for binary, most in picked),
                pointers={key: _place(pointers[key]).pointer for key in kernel.pointers},
                scalars={key: scalars[key] for key in kernel.scalars},
                names=dict(names or {}),
                when=when,
            )
        )

    def pick(
        self,
        name: str,
        pointers: Mapping[str, View | Place],
        scalars: Mapping[str, int | float | str],
        constants: Mapping[str, Constant],
    ) -> Sequence[tuple[Binary, int | None]]:
        """The binaries that a launch with these arguments chooses from."""
        kernel = KERNELS[name]
        places = {key: _place(pointers[key]) for key in kernel.pointers}
        given = {key: scalars[key] for key in kernel.scalars}
        aligned = {key for key, place in places.items() if place.pointer is None or place.pointer.offset % 16 == 0}
        aligned |= {key for key, kind in kernel.scalars.items() if kind == "i32" and _sixteens(given[key])}
        return self._pick(
            kernel,
            {key: place.type for key, place in places.items()},
            {key: constants[key] for key in kernel.constants},
            frozenset(aligned),
            given,
        )

    def finish(self) -> LaunchPlan:
        steps = (*self._steps, *self._head)
        buffers = self._lives(steps)
        activations, nbytes = arena.pack(buffers, self._bounds.symbols)
        pages = {f"{side}{i}": Pages(i, side) for i in range(len(self._layouts)) for side in _SIDES}
        return LaunchPlan(
            target=self._target,
            arch=self._target.partition(":")[2],
            bounds=self._bounds,
            binaries=tuple(self._binaries),
            weights={name: weight for weight, name in self._weights.items()},
            kv=self._layouts,
            pages=pages,
            facts={name: fact for fact, name in self._facts.items()},
            arena_bytes=nbytes,
            activations=activations,
            inputs={name: self._boundary(value) for name, value in self._signature.inputs.items()},
            outputs={name: self._boundary(value) for name, value in self._signature.outputs.items()},
            steps=steps,
            head=len(self._steps),
        )

    def _binary(self, binary: Binary) -> int:
        """The index of a binary; equal ones are one."""
        if binary not in self._binaries:
            self._binaries.append(binary)
        return self._binaries.index(binary)

    def _boundary(self, value: SSAValue) -> Value:
        view, kind = self._values[value], tensor_of(value)
        rows = "R" if self._activations[view.buffer][0] == "R" else "T"
        return Value(view.buffer, dtype_name(kind.element_type), rows, view.width, view.start, view.stride)  # type: ignore[arg-type]

    def _lives(self, steps: Sequence[Step]) -> dict[str, Activation]:
        """Every activation with the first and the last step that needs it."""
        uses: dict[str, list[int]] = {name: [] for name in self._activations}
        for value in self._signature.inputs.values():
            uses[self._values[value].buffer].append(-1)
        for index, step in enumerate(steps):
            for pointer in step.pointers.values():
                if pointer is not None and pointer.buffer in uses:
                    uses[pointer.buffer].append(index)
        for value in self._signature.outputs.values():
            uses[self._values[value].buffer].append(len(steps))
        head = len(self._steps)
        made = {}
        for name, (rows, width, type_) in self._activations.items():
            first, last = min(uses[name]), max(uses[name])
            if first < head <= last:  # the head may run again, and reads it again
                last = len(steps)
            made[name] = Activation(rows, width, type_, first, last)
        return made


_SIDES = ("k", "v")


def tensor_of(value: SSAValue) -> TensorType:  # type: ignore[type-arg]
    kind = value.type
    assert isinstance(kind, TensorType)
    return kind


def width_of(value: SSAValue) -> int:
    return int(tensor_of(value).get_shape()[1])


def type_of(value: SSAValue) -> str:
    return TYPES[dtype_name(tensor_of(value).element_type)]


def _place(argument: View | Place) -> Place:
    if isinstance(argument, Place):
        return argument
    return Place(Pointer(argument.buffer, argument.start * ELEMENT_BYTES[argument.type]), argument.type)


def _sixteens(value: float | str) -> bool:
    return isinstance(value, int) and value % 16 == 0


def _null(type_: str) -> Place:
    """A pointer that a constant makes unused."""
    return Place(None, type_)


def _user(value: SSAValue) -> Operation | None:
    """The one op that uses a value, where there is one."""
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> Emit:
    """Its users read it by name."""
    attribute_dtype(op, tensor_of(op.result).element_type)
    return lambda draft: None


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Emit:
    _weight_name(op, op.table)
    operand_dtype(op, op.table)

    def emit(d: Draft) -> None:
        out = d.make(op.result)
        tokens = d.fact(Fact("tokens", "i32", ("T",)))
        places = {"tokens": tokens, "table": d.weight([op.table]), "out": out}
        d.launch("embed", places, {"rows": "T", "H": out.width, "out_stride": out.stride}, {})

    return emit


def _norm(d: Draft, x: View, weight: SSAValue, eps: float, out: View) -> None:
    scalars = {"rows": "T", "H": x.width, "x_stride": x.stride, "out_stride": out.stride, "eps": eps}
    d.launch("rms_norm", {"x": x, "weight": d.weight([weight]), "out": out}, scalars, {"BLOCK": _power(x.width)})


def _even(width: int) -> int:
    """The largest power of two that divides K, up to the largest BLOCK_K: which tiles need no mask."""
    return min(width & -width, _LARGEST_BLOCK_K)


def _power(width: int) -> int:
    """The next power of two."""
    return 1 << (width - 1).bit_length()


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> Emit:
    _weight_name(op, op.weight)
    operand_dtype(op, op.x)
    return lambda d: _norm(d, d.view(op.x), op.weight, op.eps.value.data, d.make(op.result))


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    _weight_name(op, op.weight)
    operand_dtype(op, op.x)
    eps = op.eps.value.data

    def emit(d: Draft) -> None:
        if d.knows(op.sum):  # the product before it added already
            return _norm(d, d.view(op.sum), op.weight, eps, d.make(op.normed))
        x, y, total, out = d.view(op.x), d.view(op.y), d.make(op.sum), d.make(op.normed)
        places = {"x": x, "y": y, "weight": d.weight([op.weight]), "total": total, "out": out}
        strides = {f"{key}_stride": view.stride for key, view in places.items() if isinstance(view, View)}
        d.launch(
            "add_rms_norm", places, {"rows": "T", "H": x.width, "eps": eps, **strides}, {"BLOCK": _power(x.width)}
        )
        return None

    return emit


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    _weight_name(op, op.weight)
    operand_dtype(op, op.x)
    bias = [] if op.bias is None else [op.bias]
    for value in bias:
        _weight_name(op, value)

    def emit(d: Draft) -> None:
        user, residual = _user(op.result), None
        if isinstance(user, AddOp | AddRmsNormOp):
            other = user.y if user.x is op.result else user.x
            residual = d.view(other) if d.knows(other) else None
        if residual is None:
            out = d.make(op.result)
        else:
            assert isinstance(user, AddOp | AddRmsNormOp)
            out = d.make(user.result if isinstance(user, AddOp) else user.sum)
            d.done |= {user} if isinstance(user, AddOp) else set()
        _product(d, d.view(op.x), [op.weight], bias, out, residual)

    return emit


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    for value in (*op.weights, *op.biases):
        _weight_name(op, value)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        x, weights, biases = d.view(op.x), list(op.weights), list(op.biases)
        gated = _gated(op)
        if gated is not None:
            user, activation, order = gated
            out = d.make(user.result)
            d.done.add(user)
            stacked = [[values[i] for i in order] if values else [] for values in (weights, biases)]
            return _gated_product(d, x, *stacked, out, activation)
        widths = [width_of(product) for product in op.products]
        out = d.activation(sum(widths), x.type)
        start = 0
        for product, width in zip(op.products, widths, strict=True):
            d.set(product, out.columns(start, width))
            start += width
        return _product(d, x, weights, biases, out, None)

    return emit


def _gated(op: LinearsOp) -> tuple[SiluMulOp | GeluMulOp, str, tuple[int, int]] | None:
    """The activation that takes both products and nothing else does, its name, and which product is the gate."""
    if len(op.products) != 2:
        return None
    user, other = (_user(product) for product in op.products)
    if user is not other or not isinstance(user, SiluMulOp | GeluMulOp):
        return None
    return user, _ACTIVATIONS[_activation(user)], (0, 1) if user.x is op.products[0] else (1, 0)


def _activation(op: SiluMulOp | GeluMulOp) -> str:
    return "silu" if isinstance(op, SiluMulOp) else f"gelu {op.approximate.data}"


#: What `gemm_gated` calls the activations.
_ACTIVATIONS = {"silu": "silu", "gelu none": "gelu", "gelu tanh": "gelu_tanh"}


def _product(
    d: Draft,
    x: View,
    weights: Sequence[SSAValue],
    biases: Sequence[SSAValue],
    out: View,
    residual: View | None,
    rows: str = "T",
) -> None:
    """out = x [weights]^T + [biases] + residual."""
    places: dict[str, View | Place] = {
        "x": x,
        "w": d.weight(weights),
        "bias": d.weight(biases) if biases else _null(x.type),
        "residual": residual or _null(out.type),
        "out": out,
    }
    scalars = {
        "rows": rows,
        "N": out.width,
        "K": x.width,
        "x_stride": x.stride,
        "residual_stride": residual.stride if residual else 0,
        "out_stride": out.stride,
    }
    constants = {"HAS_BIAS": bool(biases), "HAS_RESIDUAL": residual is not None, "EVEN_K": _even(x.width)}
    d.launch("gemm", places, scalars, constants, rows=rows)


def _gated_product(
    d: Draft, x: View, weights: Sequence[SSAValue], biases: Sequence[SSAValue], out: View, activation: str
) -> None:
    """out = activation(x gate^T) * (x up^T)."""
    places: dict[str, View | Place] = {
        "x": x,
        "w": d.weight(weights),
        "bias": d.weight(biases) if biases else _null(x.type),
        "out": out,
    }
    scalars = {"rows": "T", "N": out.width, "K": x.width, "x_stride": x.stride, "out_stride": out.stride}
    constants = {"ACTIVATION": activation, "HAS_BIAS": bool(biases), "EVEN_K": _even(x.width)}
    d.launch("gemm_gated", places, scalars, constants)


def _binary(op: AddOp | SiluMulOp | GeluMulOp, kernel: str, constants: Mapping[str, Constant]) -> Emit:
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        places = {"x": d.view(op.x), "y": d.view(op.y), "out": d.make(op.result)}
        strides = {f"{key}_stride": view.stride for key, view in places.items()}
        d.launch(kernel, places, {"rows": "T", "N": places["out"].width, **strides}, constants)

    return emit


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    return _binary(op, "silu_mul", {})


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    if _activation(op) not in _ACTIVATIONS:
        raise refuse(op, "approximate", op.approximate.data, "implemented are none, tanh")
    return _binary(op, "gelu_mul", {"APPROXIMATE": op.approximate.data == "tanh"})


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    return _binary(op, "add", {})


@LOWERING.emits(
    RopeOp, "head_dim", "kind", "theta", "factor", "low_freq_factor", "high_freq_factor", "original_positions"
)
def _rope(op: RopeOp) -> Emit:
    operand_dtype(op, op.x)
    rope_of(op)
    head_dim = op.head_dim.value.data

    def emit(d: Draft) -> None:
        user = _user(op.result)
        if isinstance(user, AttentionOp) and _turns(user) is not None:
            return  # `rope_write` turns it
        x, out = d.view(op.x), d.make(op.result)
        places = {"x": x, "out": out, **_tables(d, op)}
        scalars = {"rows": "T", "x_stride": x.stride, "out_stride": out.stride}
        constants = {"HEADS": x.width // head_dim, "HEAD_DIM": head_dim, "ROTARY_DIM": head_dim}
        d.launch("rope", places, scalars, constants)

    return emit


def _turns(op: AttentionOp) -> tuple[RopeOp, RopeOp] | None:
    """The embeddings of q and k, where both are the same one, of whole heads, and nobody else reads them."""
    q, k = op.q.owner, op.k.owner
    if not isinstance(q, RopeOp) or not isinstance(k, RopeOp):
        return None
    same = q.rope == k.rope and q.head_dim.value.data == k.head_dim.value.data == op.head_dim
    return (q, k) if same and _user(q.result) is op and _user(k.result) is op else None


def _tables(d: Draft, op: RopeOp) -> dict[str, Place]:
    head_dim, rope = op.head_dim.value.data, rope_of(op)
    shape = ("T", str(head_dim // 2))
    return {
        "cos": d.fact(Fact("cos", "fp32", shape, rope=rope, head_dim=head_dim)),
        "sin": d.fact(Fact("sin", "fp32", shape, rope=rope, head_dim=head_dim)),
    }


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap")
def _attention(op: AttentionOp) -> Emit:
    dtype = operand_dtype(op, op.q)
    stored = op.cache.dtype
    if stored not in FP8.values() and attribute_dtype(op, stored) != dtype:
        raise refuse(op, "KV dtype", stored, f"q is {dtype}; KV is stored in the same dtype or in fp8")
    if op.sinks is not None:
        _weight_name(op, op.sinks)

    def emit(d: Draft) -> None:
        _Attention(d, op).emit()

    return emit


class _Attention:
    """The launches of one attention: k and v into the pages, then decode sequences, then prompts."""

    def __init__(self, d: Draft, op: AttentionOp) -> None:
        self.d, self.op, self.window = d, op, op.window_tokens
        self.heads, self.kv_heads, self.head_dim = op.heads.value.data, op.kv_heads, op.head_dim
        self.k_pages, self.v_pages = d.pages(op)
        name = kv_class(self.window)
        self.slots = d.fact(Fact("slots", "i32", ("T",), kv_class=name))
        self.table = d.fact(Fact("table", "i32", ("S", "W"), kv_class=name))
        self.kv_lens = d.fact(Fact("kv_lens", "i32", ("S",)))
        self.decodes = d.fact(Fact("decodes", "i32", ("D", "2")))
        self.sinks = _null(type_of(op.q)) if op.sinks is None else d.weight([op.sinks])
        self.scales = {"scale": op.scale.value.data, "k_scale": 1.0, "v_scale": 1.0}

    def emit(self) -> None:
        q = self.write()
        out = self.d.make(self.op.result)
        self.decode(q, out)
        self.prefill(q, out)

    def write(self) -> View:
        """k and v into the pages; q, turned where a rotary embedding stands before it."""
        d, op = self.d, self.op
        turns, v = _turns(op), d.view(op.v)
        if turns is None:
            q, k, q_out = d.view(op.q), d.view(op.k), d.view(op.q)
            sides: dict[str, View | Place] = {"q": _null(q.type), "q_out": _null(q.type)}
            tables = {"cos": _null("fp32"), "sin": _null("fp32")}
        else:
            q, k, q_out = d.view(turns[0].x), d.view(turns[1].x), d.activation(width_of(op.q), type_of(op.q))
            sides, tables = {"q": q, "q_out": q_out}, _tables(d, turns[0])
        scalars = {
            "rows": "T",
            "q_stride": q.stride,
            "k_stride": k.stride,
            "v_stride": v.stride,
            "q_out_stride": q_out.stride,
            "k_scale": 1.0,
            "v_scale": 1.0,
        }
        places = {"k": k, "v": v, "slots": self.slots, "k_pages": self.k_pages, "v_pages": self.v_pages}
        constants = {
            "HEADS": self.heads if turns else 0,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": self.head_dim if turns else 0,
        }
        d.launch("rope_write", {**places, **sides, **tables}, scalars, constants)
        return q_out

    @property
    def constants(self) -> dict[str, Constant]:
        softcap = self.op.softcap
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.heads // self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "PAGE_TOKENS": self.d.page_tokens,
            "WINDOW": self.window or 0,
            "SOFTCAP": 0.0 if softcap is None else softcap.value.data,
            "HAS_SINKS": self.op.sinks is not None,
            "SPLIT_KEYS": SPLIT_KEYS,
            "MAX_SPLITS": MAX_SPLITS,
        }

    def decode(self, q: View, out: View) -> None:
        d, most = self.d, MAX_SPLITS
        splits = f"min({MAX_SPLITS}, cdiv(L, {SPLIT_KEYS}))"
        if self.window is not None:
            most = min(MAX_SPLITS, -(-self.window // SPLIT_KEYS))
            splits = f"min({most}, cdiv(L, {SPLIT_KEYS}))"
        many = most > 1
        rows, width = f"D * {most}", self.heads * self.head_dim
        parts = {
            name: d.activation(size, "fp32", rows) if many else _null("fp32")
            for name, size in (("part", width), ("part_max", self.heads), ("part_sum", self.heads))
        }
        common = {"decodes": self.decodes, "kv_lens": self.kv_lens, "sinks": self.sinks, "out": out, **parts}
        scalars = {
            "splits": splits,
            "q_stride": q.stride,
            "out_stride": out.stride,
            "table_stride": "W",
            **self.scales,
        }
        pages = {"k_pages": self.k_pages, "v_pages": self.v_pages, "table": self.table}
        d.launch("attention_decode", {"q": q, **pages, **common}, scalars, self.constants, rows="D")
        if many:
            d.launch(
                "attention_combine", common, scalars, self.constants, rows="D", when=f"1 if L > {SPLIT_KEYS} else 0"
            )

    def prefill(self, q: View, out: View) -> None:
        d = self.d
        scalars = {"q_stride": q.stride, "out_stride": out.stride, "table_stride": "W", **self.scales}
        group = self.heads // self.kv_heads
        places = {
            "q": q,
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            "table": self.table,
            "query_starts": d.fact(Fact("query_starts", "i32", ("S + 1",))),
            "kv_lens": self.kv_lens,
            "sinks": self.sinks,
            "out": out,
        }
        # How many tokens a tile has depends on the binary, and what the host sends on how many a tile has.
        unknown = Place(Pointer("tiles"), "i32")
        ((binary, _),) = d.pick("attention_prefill", {**places, "tiles": unknown}, scalars, self.constants)
        queries = binary.tile["BLOCK_M"] // group
        tiles = d.fact(Fact("tiles", "i32", (f"P{queries}", "2"), queries=queries))
        d.launch("attention_prefill", {**places, "tiles": tiles}, scalars, self.constants, names={"P": f"P{queries}"})


@LOWERING.emits(LogitsOp)
def _logits(op: LogitsOp) -> Emit:
    _weight_name(op, op.weight)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        x, index = d.view(op.x), d.fact(Fact("logit_rows", "i32", ("A",)))
        rows = d.activation(x.width, x.type, "R")
        scalars = {"rows": "R", "H": x.width, "x_stride": x.stride, "out_stride": rows.stride}
        d.launch("gather_rows", {"x": x, "index": index, "out": rows}, scalars, {}, rows="R")
        _product(d, rows, [op.weight], [], d.make(op.result, "R"), None, rows="R")

    return emit


def _check_logits(module: ModuleOp) -> None:
    """Refuse what reads logits: their rows are not the batch's tokens."""
    for op in ops(module):
        for value in op.operands:
            if isinstance(value.owner, LogitsOp):
                raise UnsupportedError("op-unsupported", f"{op_name(op)} is not supported", why="it reads logits")
