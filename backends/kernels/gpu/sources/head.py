"""What follows the logits. Arguments: `plait.backends.kernels.gpu.streams`."""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def order(value):
    """int32 that compare as NumPy compares the float32 values: -0 is 0, and a NaN is larger than all."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, tl.where(value == 0.0, 0, ordered))


@triton.jit
def argmax(logits, out, rows, V, stride, BLOCK: tl.constexpr):
    """The first place of the largest value of a row; -1 where that is no finite number."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    # Each lane keeps the first of its own largest; the first of all is then the smallest place among the best lanes.
    best = tl.full((BLOCK,), -0x80000000, tl.int32)
    place = lane
    for start in tl.range(0, V, BLOCK):
        at = start + lane
        key = tl.where(at < V, order(tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)), -0x80000000)
        place = tl.where(key > best, at, place)
        best = tl.maximum(best, key)
    largest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == largest, place, 0x7FFFFFFF), axis=0)
    # Infinities are +-0x7F800000 in the order of `order`, the negative one's bits turned over once more.
    finite = (largest < 0x7F800000) & (largest > -0x7F800001)
    tl.store(out + row, tl.where(finite, first, -1))
