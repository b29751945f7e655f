"""Four kinds of faults that can be planted in a line of Python."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
KINDS = ("negated condition", "dropped raise", "swapped comparison", "removed await")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    line: int
    start: int
    end: int
    text: str


def possible(source: str) -> list[Fault]:
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in ast.walk(ast.parse(source)):
        for kind, target, text in _faults(node):
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            found.append(Fault(kind=kind, line=target.lineno, start=start, end=end, text=text))
    return sorted(found, key=lambda fault: (fault.start, fault.end, fault.kind))


def _faults(node: ast.AST) -> list[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [(KINDS[0], test, f"(not ({ast.unparse(test)}))")]
        case ast.Raise():
            return [(KINDS[1], node, "pass")]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SWAPS:
            swapped = ast.Compare(left=left, ops=[_SWAPS[type(op)]()], comparators=[right])
            return [(KINDS[2], node, f"({ast.unparse(swapped)})")]
        case ast.Expr(value=ast.Await(value=value)):
            return [(KINDS[3], node, f"_ = {ast.unparse(value)}")]
        case _:
            return []


def plant(source: str, fault: Fault) -> str:
    text = source.encode()
    return (text[: fault.start] + fault.text.encode() + text[fault.end :]).decode()
