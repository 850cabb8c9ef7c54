"""Kernels on the host: Triton's interpreter, made right for bfloat16 and float8, and strict about memory.

Triton keeps these types as raw unsigned integers and computes with those; here a block of them is an array of
`ml_dtypes`, whose arithmetic and casts round to nearest even as torch's do. A value that float8 cannot hold becomes NaN
(e4m3fn, e4m3fnuz) or inf (e5m2): chips differ (some saturate), so kernels clamp first, and one that forgets shows.

Every load and store must fall into the arrays that were passed, every store into one the kernel declares as written.
Integers of 32 bits that overflow are errors. What the binary was promised (alignment, types) is checked.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plait.backends.base import Array
from plait.backends.kernels.gpu import loader
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.kernel import Kernel, Variant
from plait.errors import PlaitError

#: NumPy's type for each name in `Variant.types`.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}

#: What may overflow.
_EXACT: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

#: The interpreter's builder, its patches of `triton.language` and the place of the grid are global to the process.
_LOCK = threading.RLock()


class KernelError(PlaitError):
    """A kernel, or the plan that launches it, is wrong: it leaves its arrays, overflows, or breaks a promise."""


def run(
    kernel: Kernel,
    variant: Variant,
    pointers: Mapping[str, Array | None],
    scalars: Mapping[str, int | float],
    grid: tuple[int, int, int] | None = None,
) -> None:
    """Launch a kernel on the host; written arrays are changed in place.

    Args:
        pointers: an array per pointer argument; the kernel sees its first element, so views with offsets and strides
            are fine. None is a null pointer.
        scalars: a number per scalar argument.
        grid: programs along x, y and z; by default what the kernel's own grid says, where it needs no batch symbol.

    Raises:
        KernelError: `kernel-argument`, `kernel-memory`, `kernel-failed`.
    """
    _check(kernel, variant, pointers, scalars)
    if grid is None:
        known = {**scalars, **variant.constants, **variant.tile.constants}
        names = {name: int(value) for name, value in known.items() if isinstance(value, int)}
        x, y, z = (evaluate(expression, names) for expression in kernel.grid)
        grid = (x, y, z)
    with _LOCK, np.errstate(all="ignore"), _interpreter() as triton:
        memory = _Memory(kernel, {name: array for name, array in pointers.items() if array is not None})
        arguments: dict[str, Any] = {**variant.constants, **variant.tile.constants}
        for name in kernel.pointers:
            array, element = pointers[name], triton.element(variant.types[name])
            arguments[name] = triton.pointer(0 if array is None else address(array), element)
        for name, kind in kernel.scalars.items():
            arguments[name] = triton.scalar(scalars[name], kind)
        triton.builder.memory = memory
        triton.builder.set_grid_dim(*grid)
        function = triton.function(loader.load(kernel.source))
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    triton.builder.set_grid_idx(x, y, z)
                    try:
                        function(**arguments)
                    except KernelError:
                        raise
                    except Exception as error:
                        raise KernelError(
                            "kernel-failed", f"kernel {kernel.name} failed in program ({x}, {y}, {z})", why=repr(error)
                        ) from error


def address(array: Array) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def _check(
    kernel: Kernel, variant: Variant, pointers: Mapping[str, Array | None], scalars: Mapping[str, int | float]
) -> None:
    def fault(why: str) -> KernelError:
        return KernelError("kernel-argument", f"kernel {kernel.name} is launched wrongly", why=why)

    for what, given, wanted in (
        ("pointers", set(pointers), set(kernel.pointers)),
        ("types", set(variant.types), set(kernel.pointers)),
        ("scalars", set(scalars), set(kernel.scalars)),
        ("constants", set(variant.constants), set(kernel.constants)),
        ("tile constants", set(variant.tile.constants), set(kernel.tile)),
    ):
        if given != wanted:
            raise fault(f"{what}: got {sorted(given)}, wanted {sorted(wanted)}")
    for name, array in pointers.items():
        if array is None:
            continue
        if array.dtype != NUMPY_TYPES[variant.types[name]]:
            raise fault(f"{name} is {array.dtype}, the variant has {variant.types[name]}")
        if name in variant.aligned and address(array) % 16:
            raise fault(f"{name} is not a multiple of 16 bytes, and the variant was promised that")
        if name in kernel.written and not array.flags.writeable:
            raise fault(f"{name} is written, and its array is read-only")
    for name, kind in kernel.scalars.items():
        value = scalars[name]
        if kind == "i32" and (int(value) != value or not -(2**31) <= value < 2**31):
            raise fault(f"{name} = {value} is no 32-bit integer")
        if name in variant.aligned and value % 16:
            raise fault(f"{name} = {value} is not a multiple of 16, and the variant was promised that")


class _Memory:
    """The address ranges that a launch may touch."""

    def __init__(self, kernel: Kernel, arrays: Mapping[str, Array]) -> None:
        self.kernel = kernel.name
        self.readable = _ranges(arrays)
        self.writeable = _ranges({name: arrays[name] for name in kernel.written if name in arrays})

    def check(self, at: NDArray[np.uint64], mask: NDArray[np.bool_], bytes_: int, *, store: bool) -> None:
        active = at[mask]
        if not active.size:
            return
        starts, ends = self.writeable if store else self.readable
        inside = np.searchsorted(starts, active, side="right").astype(np.int64) - 1
        wrong = (
            (inside < 0) | (active + np.uint64(bytes_) > ends[inside]) if starts.size else np.ones_like(active, bool)
        )
        if wrong.any():
            raise KernelError(
                "kernel-memory",
                f"kernel {self.kernel} {'writes' if store else 'reads'} outside its arrays",
                why=f"{int(wrong.sum())} of {active.size} elements of one access",
            )


def _ranges(arrays: Mapping[str, Array]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Starts, ascending, and the furthest end of any array that starts there or before: arrays may overlap."""
    bounds = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays.values() if array.size)
    starts = np.array([start for start, _ in bounds], np.uint64)
    return starts, np.maximum.accumulate(np.array([end for _, end in bounds], np.uint64))


@contextmanager
def _interpreter() -> Iterator[_Interpreter]:
    """Triton's language, patched for the host while inside."""
    interpreter = _load_interpreter()
    scope = interpreter.patch()
    try:
        yield interpreter
    finally:
        scope.restore()


@functools.cache
def _load_interpreter() -> _Interpreter:
    loader.require_triton()
    return _Interpreter()


class _Interpreter:
    """What is taken from Triton's interpreter, with the types repaired. One per process."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime import interpreter, jit

        self._tl, self._own, self._jit = tl, interpreter, jit
        self._functions: dict[int, Any] = {}
        self.builder = _repair(interpreter, tl)

    def element(self, name: str) -> Any:
        return self._tl.str_to_ty(name, None)

    def pointer(self, at: int, element: Any) -> Any:
        kind = self._tl.pointer_type(element)
        return self._tl.tensor(self._own.TensorHandle(np.array([at], np.uint64), kind), kind)

    def scalar(self, value: float, kind: str) -> Any:
        name = {"i32": "i32", "f32": "fp32"}[kind]
        data = np.array([value], NUMPY_TYPES[name])
        return self._tl.tensor(self._own.TensorHandle(data, self.element(name)), self.element(name))

    def function(self, jitted: Any) -> Any:
        """A Triton function as a plain one. It sees a copy of its globals, in which the Triton functions are plain."""
        if id(jitted) not in self._functions:
            plain = jitted.fn
            names: dict[str, Any] = {}
            copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
            copy.__annotations__, copy.__module__ = plain.__annotations__, plain.__module__
            copy.__kwdefaults__ = plain.__kwdefaults__
            self._functions[id(jitted)] = self._called(copy)
            names.update({n: self._plain(v) for n, v in plain.__globals__.items()})
        return self._functions[id(jitted)]

    def _called(self, copy: Any) -> Any:
        class Plain(self._own.InterpretedFunction):  # type: ignore[misc,name-defined]
            """Triton's own patches the language at every call and leaves it so; ours is patched around the launch."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return self.rewrite()(*args, **kwargs)

        return Plain(copy)

    def _plain(self, value: Any) -> Any:
        return self.function(value) if isinstance(value, self._jit.JITFunction) else value

    def patch(self) -> Any:
        """Patch the language; the caller restores. Its library functions (`tl.sum`) become plain ones too."""
        tl, language = self._tl, self._tl.core
        scope = self._own._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": language}))
        for module in (tl, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, self._jit.JITFunction):
                    scope.set_attr(module, name, self.function(value))
        for name, value in list(vars(tl.tensor).items()):
            if isinstance(value, self._jit.JITFunction):
                scope.set_attr(tl.tensor, name, _method(self.function(value)))
        return scope


def _method(function: Any) -> Any:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _repair(own: Any, tl: Any) -> Any:
    """Make Triton's one builder hold bfloat16 and float8 as what they are. Returns it."""
    narrow = {name: NUMPY_TYPES[name] for name in ("bf16", "fp8e4nv", "fp8e4b8", "fp8e5")}
    handle, plain_type = own.TensorHandle, own._get_np_dtype

    def numpy_type(kind: Any) -> np.dtype[Any]:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return narrow.get(scalar.name) or plain_type(kind)

    class Builder(own.InterpreterBuilder):  # type: ignore[misc]
        memory: _Memory

        def get_bf16(self, value: float) -> Any:
            return handle(np.array([value], narrow["bf16"]), tl.bfloat16)

        def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
            kind = ptrs.get_element_ty()
            dtype = numpy_type(kind)
            raw = np.dtype(f"u{dtype.itemsize}") if kind.name in narrow else dtype
            inside = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
            self.memory.check(ptrs.data, inside, dtype.itemsize, store=False)
            filler = np.zeros(ptrs.data.shape, raw) if other is None else np.ascontiguousarray(other.data).view(raw)
            return handle(own._interpreter.load(ptrs.data, inside, filler, raw).view(dtype), kind)

        def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
            data = np.ascontiguousarray(value.data)
            if value.dtype.scalar.name in narrow:
                data = data.view(f"u{data.itemsize}")
            inside = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
            self.memory.check(ptrs.data, inside, data.itemsize, store=True)
            return own._interpreter.store(ptrs.data, data, inside)

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            return handle(src.data.astype(numpy_type(dst_type)), dst_type.scalar)

        def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
            if rounding_mode not in (None, own._ir.ROUNDING_MODE.RTNE):
                raise NotImplementedError("the interpreter rounds to nearest even only")
            return self.cast_impl(src, dst_type)

        def create_dot(self, a: Any, b: Any, d: Any, *_: Any) -> Any:
            wide = np.int32 if d.data.dtype == np.int32 else np.float32
            product = np.matmul(a.data.astype(wide), b.data.astype(wide)) + d.data
            return handle(product.astype(d.data.dtype), d.dtype.scalar)

    class Semantic(own.TritonSemantic):  # type: ignore[misc]
        def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
            """No 32-bit sum or product wraps around. Triton's own check is slow, and only says so when debugging."""
            kind = lhs.type.scalar
            if kind.int_bitwidth < 64:
                a, b = (side.handle.data.astype(np.int64) for side in (lhs, rhs))
                exact = _EXACT[binary_op.__name__](a, b)
                least, most = kind.get_int_min_value(), kind.get_int_max_value()
                assert least <= exact.min() and exact.max() <= most, f"{kind} overflows in {binary_op.__name__}"

    own._get_np_dtype = numpy_type
    own.interpreter_builder = Builder()
    own.interpreter_semantic = Semantic(own.interpreter_builder)
    return own.interpreter_builder
