"""The expressions of launch plans: against Python's own arithmetic, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.kernels.gpu.expression import evaluate
from plait.errors import UserError

NAMES = ("T", "N", "BLOCK_M")
LEAVES = st.one_of(st.integers(0, 99).map(str), st.sampled_from(NAMES))


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%", "<", ">="]), inner).map(
            lambda p: f"({' '.join(p)})"
        ),
        st.tuples(st.sampled_from(["cdiv", "min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        inner.map(lambda p: f"(-{p})"),
    )


EXPRESSIONS = st.recursive(LEAVES, _compound, max_leaves=12)
VALUES = st.fixed_dictionaries({name: st.integers(1, 999) for name in NAMES})


def ours(expression: str, names: dict[str, int]) -> int | None:
    try:
        return evaluate(expression, names)
    except UserError as error:
        if "division by zero" not in error.why:
            raise
        return None


@given(EXPRESSIONS, VALUES)
def test_is_pythons_arithmetic(expression: str, names: dict[str, int]) -> None:
    def cdiv(a: int, b: int) -> int:
        return a // b + (a % b != 0)

    tools = {"cdiv": cdiv, "min": min, "max": max}
    try:
        expected: int | None = int(eval(expression, {"__builtins__": {}}, {**tools, **names}))
    except ZeroDivisionError:
        expected = None
    assert ours(expression, names) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "T +",
        "T / 2",
        "T ** 9",
        "__import__('os')",
        "T.real",
        "T[0]",
        "cdiv(T)",
        "min()",
        "cdiv(T, b=2)",
        "lambda: 1",
        "1.5",
        "True",
        "'T'",
        "1 < T < 3",
        "T and N",
        "[1 for _ in N]",
        "(x := 3)",
        "missing",
        "T // 0",
    ],
)  # fmt: skip
def test_refuses_anything_else(expression: str) -> None:
    with pytest.raises(UserError) as error:
        evaluate(expression, {"T": 1, "N": 2})
    assert error.value.code == "expression-wrong"
    assert expression in error.value.what
