"""Small integer expressions over names: grids, sizes and offsets of a launch plan.

`cdiv(T, BLOCK_M) * cdiv(N, BLOCK_N)`: integers, names, `+ - * // %`, `cdiv`, `min`, `max`, a comparison (1 or 0), and
a choice `a if b < c else d`. Nothing else parses: a plan is data, reading one runs no code.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

from plait.errors import UserError


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """The value, with every name given.

    Raises:
        UserError: `expression-wrong`: not of this language, a name is missing, or a division by zero.
    """
    return _value(expression, parse(expression), names)


@functools.lru_cache(maxsize=4096)
def parse(expression: str) -> ast.expr:
    """The checked tree. Read only: it is shared.

    Raises:
        UserError: `expression-wrong`.
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise _wrong(expression, str(error)) from None
    _check(expression, tree)
    return tree


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
#: Name -> function and how many arguments it takes (None: one or more).
_FUNCTIONS: dict[str, tuple[Callable[..., int], int | None]] = {
    "cdiv": (_cdiv, 2),
    "min": (lambda *values: min(values), None),
    "max": (lambda *values: max(values), None),
}


def _wrong(expression: str, why: str) -> UserError:
    return UserError("expression-wrong", f"cannot read the expression {expression!r}", why=why)


def _check(expression: str, node: ast.expr) -> None:
    for part in _parts(expression, node):
        _check(expression, part)


def _parts(expression: str, node: ast.expr) -> list[ast.expr]:
    """The operands of a node, where it is of the language."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return []
        case ast.Name():
            return []
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return [left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return [left, right]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            count = _FUNCTIONS[name][1]
            if count == len(args) or (count is None and args):
                return args
    raise _wrong(expression, f"{ast.unparse(node)!r} is not allowed here")


def _value(expression: str, node: ast.expr, names: Mapping[str, int]) -> int:
    def of(part: ast.expr) -> int:
        return _value(expression, part, names)

    try:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return names[name]
            case ast.UnaryOp(operand=operand):
                return -of(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](of(left), of(right))
            case ast.Compare(left=left, ops=[compare], comparators=[right]):
                return int(_COMPARE[type(compare)](of(left), of(right)))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return of(body) if of(test) else of(orelse)
            case ast.Call(func=ast.Name(id=name), args=args):
                return _FUNCTIONS[name][0](*map(of, args))
    except KeyError as error:
        raise _wrong(expression, f"{error.args[0]} has no value") from None
    except ZeroDivisionError:
        raise _wrong(expression, "division by zero") from None
    raise AssertionError(ast.dump(node))
