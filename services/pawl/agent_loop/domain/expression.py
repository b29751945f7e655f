"""Expressions in CEL (Common Expression Language) over the results of a job.

They are written by models and judge what strangers send, so both are hostile. An expression reaches its three
variables and nothing else: no time, no file, no regular expression. What it may cost is bounded before it runs, in
steps and not in seconds, so the same expression and data come to the same everywhere. What makes values larger in each
step (map, filter, macros in macros) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from cel_expr_python import cel  # type: ignore[import-untyped]  # ships .pyi but no py.typed

CHARACTERS_MAX: Final = 256
VALUE_BYTES_MAX: Final = 64 * 1024
"""Most bytes of a value, as JSON, that an expression looks at."""
_VISITS_MAX: Final = 3_000_000
"""Most places that all iterations of a macro together may look at, some 0.1 s."""
_EXACT_MAX: Final = 2**53
_MACROS: Final = re.compile(r"\b(?:all|exists|exists_one)\b")
_NAMES: Final = re.compile(r"\b(?:value|previous)\b")
_PLACE: Final = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): ([^\n]*)")
_OPERATORS: Final = "_&&_ _||_ !_ _?_:_ _==_ _!=_ _<_ _<=_ _>_ _>=_ _+_ _-_ _*_ _/_ _%_ -_ @in _[_] @not_strictly_false"
_FUNCTIONS: Final = "size contains startsWith endsWith int uint double string bool dyn type timestamp duration"
_CONFIG: Final = {
    "name": "job",
    "stdlib": {
        "include_macros": ["has", "all", "exists", "exists_one"],
        "include_functions": [{"name": name} for name in f"{_OPERATORS} {_FUNCTIONS}".split()],
    },
    "variables": [
        {"name": "value", "type_name": "dyn"},
        {"name": "previous", "type_name": "dyn"},
        {"name": "fired", "type_name": "int"},
    ],
}
# JSON is YAML.
_ENVIRONMENT: Final = cel.NewEnv(config=cel.NewEnvConfigFromYaml(msgspec.json.encode(_CONFIG).decode()))


class ExpressionError(ValueError):
    """An expression that is none, or comes to nothing with some values; the message says why."""


def check(source: str) -> None:
    """Return if `source` is an expression that may be evaluated.

    Raises:
        ExpressionError: it is not; the message says where.
    """
    if not 0 < len(source) <= CHARACTERS_MAX:
        raise ExpressionError(f"an expression has 1 to {CHARACTERS_MAX} characters")
    if not source.isprintable():
        raise ExpressionError("an expression stands in one line")
    if len(_MACROS.findall(source)) > 1:
        raise ExpressionError("an expression has one of all, exists and exists_one at most")
    kind = _compiled(source).return_type()
    if kind not in (cel.Type.BOOL, cel.Type.DYN):
        raise ExpressionError(f"an expression is true or false, and this one is of type {kind.name().lower()}")


def names_previous(source: str) -> bool:
    """Return whether an expression may look at the value before."""
    return re.search(r"\bprevious\b", source) is not None


def evaluate(source: str, *, value: Any, previous: Any, fired: int) -> bool:
    """Return what an expression comes to that was checked. Numbers are doubles, as in JSON, if they are exact so.

    Raises:
        ExpressionError: it comes to an error, to what is neither true nor false, or would look at too much.
    """
    data = {"value": value, "previous": previous}
    size_bytes = max(len(msgspec.json.encode(each)) for each in data.values())
    if size_bytes > VALUE_BYTES_MAX:
        raise ExpressionError(f"the value has {size_bytes} bytes, at most {VALUE_BYTES_MAX} are looked at: give a path")
    names = len(_NAMES.findall(source))
    if _MACROS.search(source) and names > 1:
        longest, places = _measured(list(data.values()))
        if longest * (names - 1) * places > _VISITS_MAX:
            raise ExpressionError("the value is too large for a macro beside a further value or previous: give a path")
    try:
        found = _compiled(source).eval(data={**{name: _plain(each) for name, each in data.items()}, "fired": fired})
    except (RuntimeError, OverflowError, UnicodeError) as error:
        raise ExpressionError(_first_line(str(error))) from None
    if found.type() == cel.Type.ERROR:
        raise ExpressionError(_first_line(str(found.value())))
    outcome = found.value()
    if not isinstance(outcome, bool):
        raise ExpressionError(f"it comes to a {found.type().name().lower()}, which is neither true nor false")
    return outcome


@lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    try:
        return _ENVIRONMENT.compile(source)
    except (RuntimeError, TypeError, UnicodeError) as error:
        place = _PLACE.search(str(error))
        if place is None:
            raise ExpressionError(_first_line(str(error))) from None
        column, said = int(place[2]), place[3].replace(" (in container '')", "")
        raise ExpressionError(f"column {column}: {said}"[:300] if column > 0 else said[:300]) from None


def _first_line(said: str) -> str:
    return (said.splitlines() or [""])[0].removesuffix(" [INTERNAL]")[:300]


def _measured(values: list[Any]) -> tuple[int, int]:
    """Return the length of the longest list, object or literal, and the number of places and 32 bytes of text."""
    longest, places, rest = CHARACTERS_MAX // 2, 0, values
    while rest:
        each = rest.pop()
        places += 1
        if isinstance(each, str):
            places += len(each) // 32
        elif isinstance(each, list | dict):
            longest = max(longest, len(each))
            rest += each.values() if isinstance(each, Mapping) else each
    return longest, places


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if _EXACT_MAX < abs(value) < 2**63 else float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value
