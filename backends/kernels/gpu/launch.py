"""The launch plan of a slice: what is launched, in which order, on which memory. Plain data, one JSON file.

Reading and running a plan needs neither Triton nor the slice's module. Every number that depends on the batch is an
expression (`plait.backends.kernels.gpu.expression`) over these symbols:

    T  new tokens                                       S  sequences
    D  sequences with one new token (decode)            L  keys of the longest of them, rounded up
    A  logit rows                                       R  logit rows of one pass over the head
    G  1 where only the best token of each is wanted
    W  entries of a row of a page table                 P8  prefill tiles of 8 tokens; so for every size of a tile

Memory is of four kinds, all called by name: `weights` and `kv` for as long as the slice is loaded, `facts` of the batch
(made on the host, sent in one copy), and activations in the `arena`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from plait.backends.kernels.gpu.kernel import Constant, Tile, Variant
from plait.ir.rope import Rope
from plait.spec import KVLayout

#: Starts of buffers, in bytes: what the widest loads want, and a cache line.
ALIGNMENT = 256

#: Bytes of one element by `Variant.types`.
ELEMENT_BYTES = {"fp32": 4, "i32": 4, "fp16": 2, "bf16": 2, "i8": 1, "u8": 1, "fp8e4nv": 1, "fp8e4b8": 1, "fp8e5": 1}


@dataclass(frozen=True)
class Bounds:
    """The largest batch that the plan has memory for: `plait.backends.base.CompileOptions`.

    Attributes:
        rows: logit rows of one pass over the head. A batch that asks for more goes over it again.
    """

    tokens: int
    sequences: int
    rows: int
    page_tokens: int

    @property
    def symbols(self) -> dict[str, int]:
        """The largest values of the symbols that sizes of activations depend on."""
        return {"T": self.tokens, "S": self.sequences, "R": self.rows, "D": self.sequences}


@dataclass(frozen=True)
class Binary:
    """A kernel as it is launched. The arguments are a pointer for each of `types`, then `scalars`, then Triton's two
    scratch pointers, which are null.

    Attributes:
        constants, tile, num_stages, aligned, small: what the code was made with (`plait.backends.kernels.gpu.kernel`);
            expressions of `grid` use the first two.
        symbol, file: the function, and the file of the artifact that holds it; empty where no code was made.
        threads: threads of one block.
        shared_bytes: dynamic shared memory (LDS) of one block.
    """

    kernel: str
    types: dict[str, str]
    scalars: dict[str, Literal["i32", "f32"]]
    constants: dict[str, Constant]
    tile: dict[str, int]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...]
    small: tuple[str, ...]
    grid: tuple[str, str, str]
    symbol: str = ""
    file: str = ""
    threads: int = 0
    shared_bytes: int = 0

    @property
    def variant(self) -> Variant:
        tile = Tile(self.tile, self.num_warps, self.num_stages)
        return Variant(self.kernel, self.types, self.constants, tile, frozenset(self.aligned), frozenset(self.small))


@dataclass(frozen=True)
class Pointer:
    """A place in a buffer. `offset` is in bytes."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Choice:
    """A binary (an index of `LaunchPlan.binaries`) for at most `most` rows; None: for any number."""

    binary: int
    most: int | None = None


@dataclass(frozen=True)
class Step:
    """One launch. It is left out where its grid is empty, or `when` is 0.

    Attributes:
        op: the op it comes from, for people.
        rows: the symbol that picks among `choices`, which ascend.
        pointers: by argument; None is a null pointer.
        scalars: by argument; text is an expression.
        names: further names for the grid: argument-like words of the kernel, as expressions.
    """

    op: str
    rows: str
    choices: tuple[Choice, ...]
    pointers: dict[str, Pointer | None]
    scalars: dict[str, int | float | str]
    names: dict[str, str] = field(default_factory=dict)
    when: str = "1"


Part = Literal["values", "codes", "scale", "zero"]


@dataclass(frozen=True)
class Weight:
    """Tensors of the checkpoint, one behind the other: stacked along their first dimension.

    Attributes:
        shapes: of the tensors, as the checkpoint has them.
        dtype: what is held: the compute dtype of values; codes as they are, or `e4m3fnuz` of `e4m3fn`; of scales and
            zeros float32, float16 or bfloat16.
        part: `values` are dequantised where the tensor is quantised; the others are parts of a quantised tensor.
        block: rows and columns of a matrix that share a scale, in `scale` and `zero`; 0 means all of them. Where the
            checkpoint's are larger, its numbers are repeated.
        codes: of parts, how the codes are held; format: the checkpoint's element type.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    part: Part = "values"
    block: tuple[int, int] | None = None
    codes: str | None = None
    format: str | None = None

    @property
    def type(self) -> str:
        """The element type as kernels call it. Two 4-bit codes are one byte."""
        return TYPES[self.dtype]

    def held(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is held of a tensor."""
        if self.block is not None:
            across = zip(shape[-2:], self.block, strict=True)
            return (*shape[:-2], *(-(-size // part) if part else 1 for size, part in across))
        return (*shape[:-1], shape[-1] // 2) if self.dtype == "u4" else shape

    @property
    def nbytes(self) -> int:
        return sum(prod(self.held(shape)) for shape in self.shapes) * ELEMENT_BYTES[self.type]


Side = Literal["k", "v"]
SIDES: tuple[Side, ...] = ("k", "v")


@dataclass(frozen=True)
class Pages:
    """K or V pages of one layer, (page, token, kv_head, head_dim). Where K holds the values too, there is no V."""

    layer: int
    side: Side


FactKind = Literal[
    "tokens",
    "positions",
    "logit_rows",
    "query_starts",
    "kv_lens",
    "decodes",
    "tiles",
    "slots",
    "table",
    "cos",
    "sin",
]


@dataclass(frozen=True)
class Fact:
    """An array that the host makes for each batch. `plait.backends.kernels.gpu.batch` makes it.

    Attributes:
        shape: expressions.
        kv_class: of `slots` and `table`.
        queries: tokens of a tile, of `tiles`.
        rope, head_dim: of `cos` and `sin`; head_dim is how many features of a head turn.
    """

    kind: FactKind
    type: Literal["i32", "fp32"]
    shape: tuple[str, ...]
    kv_class: str | None = None
    queries: int | None = None
    rope: Rope | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class Activation:
    """A stretch of the arena.

    Attributes:
        rows: an expression; `width` elements of `type` each.
        first, last: the steps between which it holds something, both included; -1 is before the first step, and the
            number of steps is after the last.
        offset, nbytes: in the arena; nbytes at the plan's bounds.
    """

    rows: str
    width: int
    type: str
    first: int
    last: int
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Value:
    """A boundary tensor: `width` columns from `column` on of rows of `stride` elements of an activation. It is left out
    where `when` is 0."""

    buffer: str
    dtype: str
    rows: Literal["T", "R"]
    width: int
    column: int
    stride: int
    when: str


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that runs a slice.

    Attributes:
        head: the first step of those that work on logit rows; they come last, and are done again where a batch asks
            for more rows than the plan has memory for.
        kv: the layout of each layer, in the order of the slice's KV arguments.
    """

    target: str
    arch: str
    bounds: Bounds
    binaries: tuple[Binary, ...]
    weights: dict[str, Weight]
    kv: tuple[KVLayout, ...]
    pages: dict[str, Pages]
    facts: dict[str, Fact]
    arena_bytes: int
    activations: dict[str, Activation]
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    steps: tuple[Step, ...]
    head: int
    schema: Literal[1] = 1


#: Compute dtypes and codes as kernels call them.
TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "e4m3fn": "fp8e4nv",
    "e4m3fnuz": "fp8e4b8",
    "e5m2": "fp8e5",
    "i8": "i8",
    "u4": "i8",
}
