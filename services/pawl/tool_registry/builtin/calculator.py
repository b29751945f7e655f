"""A calculator restricted to arithmetic."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, Final

import simpleeval  # type: ignore[import-untyped]  # ships no types

from pawl.chassis.strict_json import INTEGER_MAX, INTEGER_MIN
from pawl.tools.sdk.context import ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

EXPRESSION_CHARACTERS_MAX: Final = 500
# Maximum size of an integer, which also applies to intermediate results.
BITS_MAX: Final = 4096
_FACTORIAL_MAX: Final = 400
_ROUND_DIGITS_MAX: Final = 300
_NODES_MAX: Final = 200

Number = int | float


def calculator_tools() -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    def calculate(
        expression: Annotated[str, "for example (17 * 23 + 4) / 2, sqrt(2) ** 3 or round(7 / 3, 2)"],
    ) -> dict[str, Any]:
        """Evaluate an arithmetic expression.

        Supports + - * / // % ** (or ^), parentheses, comparisons, pi, e, tau, and abs,
        ceil, floor, round, min, max, sum of several, sqrt, exp, log, log2, log10,
        sin, cos, tan, asin, acos, atan, atan2, degrees, radians, hypot, factorial,
        gcd, lcm. Whole numbers are exact.
        """
        return {"expression": expression, "result": evaluate(expression)}

    return [calculate]


def evaluate(expression: str) -> int | float | bool | str:
    """Return the value of an expression. Integers beyond 64 bits are returned as strings.

    Raises:
        ToolError: The expression cannot be evaluated. The message explains why.
    """
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ToolError(f"the expression has more than {EXPRESSION_CHARACTERS_MAX} characters")
    evaluator = simpleeval.SimpleEval(operators=_OPERATORS, functions=_FUNCTIONS, names=_NAMES)
    evaluator.nodes = {kind: node for kind, node in evaluator.nodes.items() if kind in _NODES}
    try:
        parsed = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        _check(parsed)
        value = evaluator.eval(expression, previously_parsed=parsed.body)
    except (simpleeval.InvalidExpression, SyntaxError) as error:
        raise ToolError(f"invalid expression: {_message_of(error)}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError, KeyError) as error:
        raise ToolError(f"cannot be evaluated: {_message_of(error)}") from None
    return _to_json(value)


def _check(parsed: ast.Expression) -> None:
    nodes = list(ast.walk(parsed))
    if len(nodes) > _NODES_MAX:
        raise ToolError("the expression has too many parts")
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float, bool):
            raise ToolError("only numbers are supported")
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            _bounded(node.value)
        if isinstance(node, ast.keyword | ast.Starred):
            raise ToolError("functions take only positional arguments")


def _to_json(value: Any) -> int | float | bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if INTEGER_MIN <= value <= INTEGER_MAX else str(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise ToolError("the result is not a number")
        if math.isinf(value):
            raise ToolError("the result is too large")
        return value
    raise ToolError("the result is not a real number")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > BITS_MAX:
        raise ToolError(f"an intermediate result has more than {BITS_MAX} bits")
    return value


def _power(base: Number, exponent: Number) -> Any:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    # Check the size of the result before computing it.
    if is_whole and exponent * (int(base).bit_length() - 1) > BITS_MAX:
        raise ToolError(f"an intermediate result has more than {BITS_MAX} bits")
    return _bounded(base**exponent)


def _factorial(number: Number) -> int:
    if number > _FACTORIAL_MAX:
        raise ToolError(f"factorial takes at most {_FACTORIAL_MAX}")
    return math.factorial(int(number)) if number == int(number) else math.factorial(number)  # type: ignore[arg-type]


def _round(number: Number, digits: int = 0) -> Number:
    if abs(digits) > _ROUND_DIGITS_MAX:
        # A negative number of digits would compute a large power of ten.
        raise ToolError(f"round takes at most {_ROUND_DIGITS_MAX} digits")
    return round(number, digits) if digits else round(number)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: _bounded(function(*numbers))


_OPERATORS: Final[dict[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: _limited(operator.add),
    ast.Sub: _limited(operator.sub),
    ast.Mult: _limited(operator.mul),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    name: _limited(function)
    for name, function in {
        "abs": abs,
        "round": _round,
        "min": min,
        "max": max,
        "sum": lambda *numbers: sum(numbers),
        "factorial": _factorial,
        **{
            name: getattr(math, name)
            for name in (
                *("ceil", "floor", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos"),
                *("atan", "atan2", "degrees", "radians", "hypot", "gcd", "lcm"),
            )
        },
    }.items()
}
_NAMES: Final = {"pi": math.pi, "e": math.e, "tau": math.tau}
_NODES: Final = frozenset({ast.Expr, ast.Name, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call, ast.Constant, ast.IfExp})


def _message_of(error: Exception) -> str:
    return str(error).partition(" (<")[0][:200]
