"""`plait.opaque`: a whole decoder that plait's own ops cannot say, as a program that only XLA compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from xdsl.dialects.builtin import I64, ArrayAttr, DenseArrayBase, Float32Type, StringAttr, TensorType, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, prop_def, result_def, var_operand_def

from plait.errors import UnsupportedError
from plait.ir.facts import Cost, Step
from plait.ir.ops.base import FORMAT, Float64, I64Attr, PlaitOp, properties, require, weight_type
from plait.ir.types import BatchType, KVType, dtype_name, tensor_bytes, tokens_by

HISTORY = KVType.get(1, 1, Float32Type())
"""What the op keeps between steps: K holds the sequence's token ids (float32 is exact up to 2^24), V nothing."""


@irdl_op_definition
class OpaqueOp(PlaitOp):
    """Scores of a decoder from its tokens, by a StableHLO program that torch-mlir wrote: weights and tokens in, logits
    out. It has no KV cache: every step runs the program on each sequence from its first token on.

    `programs[i]` is `@main(weights..., tokens 1 x lengths[i] x i32) -> lengths[i] x vocabulary x f32`; a sequence takes
    the first that holds it, padded behind its end, so the program must be causal. `flops[i]` counts its matrix products
    and convolutions alone. plait does not know what is inside: the oracle has no answer, and backends other than xla
    refuse it.
    """

    name = "plait.opaque"
    FORMULA: ClassVar[str] = "the program of a length, on weights and tokens; of its scores the logit_rows"
    ELSEWHERE: ClassVar[str] = "it is a program for XLA alone: place it on an xla device"

    batch = operand_def(BatchType)
    kv = operand_def(KVType)
    weights = var_operand_def(TensorType)
    programs = prop_def(ArrayAttr[StringAttr])
    lengths = prop_def(DenseArrayBase[I64])
    flops = prop_def(DenseArrayBase[I64])
    vocabulary = prop_def(I64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        batch: SSAValue,
        kv: SSAValue,
        weights: Sequence[SSAValue],
        *,
        programs: Sequence[str],
        lengths: Sequence[int],
        flops: Sequence[int],
        vocabulary: int,
        block: int | None = None,
    ) -> None:
        super().__init__(
            operands=[batch, kv, list(weights)],
            result_types=[tokens_by(vocabulary, Float32Type())],
            properties={
                **properties(vocabulary=vocabulary, block=block),
                "programs": ArrayAttr([StringAttr(text) for text in programs]),
                "lengths": DenseArrayBase.from_list(i64, list(lengths)),
                "flops": DenseArrayBase.from_list(i64, list(flops)),
            },
        )

    @property
    def cache(self) -> KVType:
        kind = self.kv.type
        assert isinstance(kind, KVType)
        return kind

    @property
    def window_tokens(self) -> None:
        """The whole sequence is kept."""
        return None

    @property
    def texts(self) -> tuple[str, ...]:
        """The programs, as StableHLO."""
        return tuple(text.data for text in self.programs.data)

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """The static length of each program, in tokens."""
        return tuple(self.lengths.get_values())

    @property
    def dtype(self) -> str:
        """The dtype that most bytes of its weights are in."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            assert isinstance(weight.type, TensorType)
            sizes[dtype_name(weight.type.element_type)] += tensor_bytes(weight.type)
        return max(sizes, key=sizes.__getitem__)

    def index_for(self, tokens: int) -> int:
        """The program that takes a sequence of `tokens` tokens: the first that holds it, else the last."""
        lengths = self.token_lengths
        return next((i for i, length in enumerate(lengths) if length >= tokens), len(lengths) - 1)

    def infer(self) -> Sequence[Attribute]:
        lengths, flops = self.token_lengths, tuple(self.flops.get_values())
        require(self.cache == HISTORY, "its KV is {}, not {}", self.kv.type, HISTORY)
        for weight in self.weights:
            kind = weight.type
            assert isinstance(kind, TensorType)
            weight_type(weight, "a weight", len(kind.get_shape()))
        require(len(self.weights) > 0, "at least one weight")
        require(len(lengths) > 0, "at least one program")
        require(
            len(self.texts) == len(lengths) == len(flops),
            "{} programs, {} lengths and {} flops",
            len(self.texts),
            len(lengths),
            len(flops),
        )
        require(
            lengths[0] > 0 and list(lengths) == sorted(set(lengths)), "lengths ascend from above 0, not {}", lengths
        )
        require(all(self.texts), "a program is not empty")
        require(min(flops) >= 0, "flops are not negative: {}", flops)
        vocabulary = self.vocabulary.value.data
        require(vocabulary > 0, "vocabulary must be positive, not {}", vocabulary)
        return (tokens_by(vocabulary, Float32Type()),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        raise UnsupportedError(
            "oracle-opaque",
            "the NumPy oracle has no answer for plait.opaque",
            why="its meaning is a StableHLO program, which only XLA runs",
            hint="compare with the torch program that it was made from",
        )

    def cost(self, step: Step) -> Cost:
        """One run of a program per sequence, each reading every weight; activations inside it are not known."""
        runs, flops = len(step.kv_lens), self.flops.get_values()
        size = sum(tensor_bytes(weight.type) for weight in self.weights if isinstance(weight.type, TensorType))
        return Cost(
            flops=float(sum(flops[self.index_for(length)] for length in step.kv_lens)),
            weight_bytes=float(runs * size),
            activation_bytes=4.0 * step.logit_rows * self.vocabulary.value.data,
            kv_bytes=4.0 * (sum(step.kv_lens) + step.tokens),
        )
