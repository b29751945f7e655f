"""Checks and evaluates CEL (Common Expression Language) expressions over untrusted data.

Models write the expressions, and the data is untrusted, so both may be hostile. An expression can only use the
variables of its environment, and has no access to the time, files or regular expressions. Its cost is bounded before it
runs, in steps rather than seconds, so the same expression and data have the same outcome everywhere. The slowest
permitted expression takes about 30 ms. An expression may use only one macro, because nested macros make values grow
with each step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from cel_expr_python import cel  # type: ignore[import-untyped]  # ships .pyi but no py.typed

CHARACTERS_MAX: Final = 256
# Limit for a value as JSON.
VALUE_BYTES_MAX: Final = 64 * 1024
# Limit per evaluation; a step takes at most 0.5 µs.
_STEPS_MAX: Final = 60_000
# Number of steps to convert one number, string, list or object.
_CONVERSION_STEPS: Final = 5
_PARSING_STEPS: Final = 8
_EXACT_MAX: Final = 2**53
_MACROS: Final = re.compile(r"\.\s*(?:all|exists|exists_one|(map|filter))\s*\(")
# `map` and `filter` copy their list for each item. This is the square of the number of items copied in one step.
_COPIED: Final = 25
_OPERATIONS: Final = re.compile(r"[=!<>&|]+|[-+*/%?.(\[,:]|\bin\b")
_PARSING: Final = re.compile(r"\b(?:timestamp|duration|double|u?int|string)\b")
_SEARCH: Final = re.compile(r"\bcontains\b")
_SEARCH_FOR_LITERAL: Final = re.compile(r"\bcontains\s*\(\s*['\"]")
_POSITION: Final = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): ([^\n]*)")
# The parser's messages, with the unexpected text.
_SYNTAX: Final = re.compile(
    r"Syntax error: (?:(missing) (.*) at .*|(?:token recognition error at: |.*? input )'(.*?)'(?: expecting .*)?)$"
)
_OPERATORS: Final = "_&&_ _||_ !_ _?_:_ _==_ _!=_ _<_ _<=_ _>_ _>=_ _+_ _-_ _*_ _/_ _%_ -_ @in _[_] @not_strictly_false"
_FUNCTIONS: Final = "size contains startsWith endsWith int uint double string bool dyn type timestamp duration"


class ExpressionError(ValueError):
    """Raised when an expression is invalid or fails for a value. The message contains the reason."""


class Meter:
    """A limit on the total steps of one or more evaluations."""

    def __init__(self) -> None:
        self._steps_left = _STEPS_MAX

    def spend(self, steps: int) -> bool:
        self._steps_left -= steps
        return self._steps_left >= 0


class Environment:
    """An environment for expressions: the CEL type of each variable (`dyn` for JSON).

    `hint` is added to errors about too much data.
    """

    def __init__(self, variables: Mapping[str, str], *, characters_max: int, bytes_max: int, hint: str = "") -> None:
        self._characters_max, self._bytes_max, self._hint = characters_max, bytes_max, hint
        self._json = [name for name, kind in variables.items() if kind == "dyn"]
        self._names = re.compile(rf"\b(?:{'|'.join(self._json)})\b")
        config = {
            "name": "pawl",
            "stdlib": {
                "include_macros": ["has", "all", "exists", "exists_one", "map", "filter"],
                "include_functions": [{"name": name} for name in f"{_OPERATORS} {_FUNCTIONS}".split()],
            },
            "variables": [{"name": name, "type_name": kind} for name, kind in variables.items()],
        }
        # JSON is valid YAML.
        self._env = cel.NewEnv(config=cel.NewEnvConfigFromYaml(msgspec.json.encode(config).decode()))
        self.compile = lru_cache(maxsize=256)(self._compile)

    def evaluate(self, source: str, data: Mapping[str, Any], meter: Meter) -> Any:
        """Return the value of an expression as JSON. Times become text.

        Raises:
            ExpressionError: The expression is invalid, it fails, or it would process too much data.
        """
        expression = self.compile(source)
        values = [data[name] for name in self._json]
        size_bytes = max((len(msgspec.json.encode(each)) for each in values), default=0)
        if size_bytes > self._bytes_max:
            raise ExpressionError(f"the value is {size_bytes} bytes, over the limit of {self._bytes_max}{self._hint}")
        if not meter.spend(self._steps(source, values)):
            raise ExpressionError(f"the expression produces a value that is too large{self._hint}")
        try:
            found = expression.eval(data=data)
            if found.type() == cel.Type.ERROR:
                raise ExpressionError(_first_line(str(found.value())))
            outcome = found.plain_value()
            encoded = msgspec.json.encode(outcome)
        except (RuntimeError, OverflowError, UnicodeError, TypeError) as error:
            raise ExpressionError(_first_line(str(error))) from None
        if len(encoded) > self._bytes_max:
            raise ExpressionError(f"the result is {len(encoded)} bytes, over the limit of {self._bytes_max}")
        if not _is_finite(outcome):
            raise ExpressionError("the result is not a finite number")
        return msgspec.json.decode(encoded)

    def _compile(self, source: str) -> Any:
        """Check and compile an expression.

        Raises:
            ExpressionError: The expression is not allowed. The message contains the reason.
        """
        if not 0 < len(source) <= self._characters_max:
            raise ExpressionError(f"an expression must have 1 to {self._characters_max} characters")
        if not source.isprintable():
            raise ExpressionError("an expression must be printable and on one line")
        if len(_MACROS.findall(source)) > 1:
            raise ExpressionError("an expression may use all, exists, exists_one, map or filter only once in total")
        try:
            return self._env.compile(source)
        except (RuntimeError, TypeError, UnicodeError) as error:
            position = _POSITION.search(str(error))
            if position is None:
                raise ExpressionError(_first_line(str(error))) from None
            column, text = int(position[2]), _SYNTAX.sub(_plain, position[3]).replace(" (in container '')", "")
            raise ExpressionError(f"column {column}: {text}"[:300] if column > 0 else text[:300]) from None

    def _steps(self, source: str, values: list[Any]) -> int:
        """Return an upper bound on the number of steps in an evaluation.

        The bound assumes that each operation visits everything in its operands, that `+` makes values larger, and that
        a macro repeats what follows it.
        """
        longest, nodes, characters = _measured(values)
        macro = _MACROS.search(source)
        before = len(self._names.findall(source, 0, macro.start())) if macro else len(self._names.findall(source))
        after = len(self._names.findall(source, macro.end())) if macro else 0
        searches = len(_SEARCH.findall(source))
        divisor = 16 if not searches else 4 if searches == len(_SEARCH_FOR_LITERAL.findall(source)) else 1
        size = nodes + characters // divisor
        work = (before + after) * size
        if macro:
            iterations = before * longest + len(source) // 2
            operations = len(_OPERATIONS.findall(source)) + _PARSING_STEPS * len(_PARSING.findall(source))
            work = operations * (before * size + iterations) + after * iterations * size
            work += iterations**2 // _COPIED if macro[1] else 0
        return _CONVERSION_STEPS * nodes + (1 + source.count("+")) * work


_JOB: Final = Environment(
    {"value": "dyn", "previous": "dyn", "fired": "int"},
    characters_max=CHARACTERS_MAX,
    bytes_max=VALUE_BYTES_MAX,
    hint=": set a path to select a part of it",
)


def check(source: str) -> None:
    """Check that an expression over a job's results is allowed.

    Raises:
        ExpressionError: The expression is not allowed. The message contains the reason.
    """
    kind = _JOB.compile(source).return_type()
    if kind not in (cel.Type.BOOL, cel.Type.DYN):
        raise ExpressionError(
            f"an expression must evaluate to true or false, but this one has type {kind.name().lower()}"
        )


def names_previous(source: str) -> bool:
    return re.search(r"\bprevious\b", source) is not None


def evaluate(source: str, *, value: Any, previous: Any, fired: int) -> bool:
    """Evaluate a checked expression over a job's results. Integers of up to 53 bits become doubles.

    Raises:
        ExpressionError: The evaluation fails, its result is neither true nor false, or it would process too much data.
    """
    outcome = _JOB.evaluate(
        source, {"value": with_doubles(value), "previous": with_doubles(previous), "fired": fired}, Meter()
    )
    if not isinstance(outcome, bool):
        raise ExpressionError(f"the result must be true or false, but is {outcome!r:.100}")
    return outcome


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value are finite, as JSON requires."""
    if isinstance(value, list | dict):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _first_line(text: str) -> str:
    found = (text.splitlines() or [""])[0].removesuffix(" [INTERNAL]")[:300]
    is_mixed = "No matching overloads" in found and "int64" in found and "double" in found
    return f"{found}: write 2.0 instead of 2, or double(x)" if is_mixed else found


def _plain(found: re.Match[str]) -> str:
    if found[1]:
        return f"{found[2]} is missing"
    return "the expression ends too early" if found[3] == "<EOF>" else f"unexpected {found[3]!r}"


def _measured(values: list[Any]) -> tuple[int, int, int]:
    """Return the length of the longest list or object, and the number of values and characters.

    Counting stops once the values alone would take too many steps.
    """
    longest, nodes, characters, rest = 0, 0, 0, list(values)
    while rest and nodes * _CONVERSION_STEPS <= _STEPS_MAX:
        each = rest.pop()
        nodes += 1
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, list | dict):
            longest = max(longest, len(each))
            if isinstance(each, dict):
                characters += sum(map(len, each))
                each = each.values()
            rest += each
    return longest, nodes, characters


def with_doubles(value: Any) -> Any:
    """Return a JSON value with its integers of up to 53 bits converted to doubles, so that 20 equals 20.0."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if _EXACT_MAX < abs(value) < 2**63 else float(value)
    if isinstance(value, list):
        return [with_doubles(each) for each in value]
    if isinstance(value, dict):
        return {name: with_doubles(each) for name, each in value.items()}
    return value
