"""Counts, filters and groups lines of a text file or rows of a CSV file, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import partial
from typing import Any, Final

import jsonschema_rs

from pawl.tools.rules.schema import did_you_mean
from pawl.tools.sdk.context import ToolError

GROUPS_MAX: Final = 10_000
GROUPS_CHARACTERS_MAX: Final = 1_000_000
SAMPLE_ROWS: Final = 10
SAMPLE_CHARACTERS: Final = 200
_PATTERN_BYTES_MAX: Final = 64 * 1024
_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,2})?", re.ASCII)
# Without traps, so that no input raises.
_DECIMAL: Final = Context(prec=60, traps=[])
_EXACT: Final = 2**53
_MEASURES: Final = ("sum", "mean", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query on a file. All fields other than `pattern` require a CSV file with a header."""

    # A regular expression without look-around or back-references, which is matched in linear time.
    pattern: str = ""
    pattern_column: str = ""
    columns: Sequence[str] = ()
    group_by: Sequence[str] = ()
    measures: Sequence[str] = ()

    @property
    def is_csv(self) -> bool:
        return bool(self.pattern_column or self.columns or self.is_grouped)

    @property
    def is_grouped(self) -> bool:
        return bool(self.group_by or self.measures)


class Tally:
    """Counts and groups the rows read so far. Each line of a text file is a row with one cell.

    Raises:
        ToolError: The pattern is invalid, or the header lacks a column.
    """

    def __init__(self, query: Query, header: Sequence[str]) -> None:
        find = partial(_index, header)
        self._pattern = _compiled(query.pattern)
        self._pattern_cell = find(query.pattern_column) if query.pattern_column else None
        self._chosen = [find(name) for name in query.columns]
        self._key = [find(name) for name in query.group_by]
        self._measured = [find(name) for name in query.measures]
        self._query = query
        self._key_characters = 0
        # For each group: its count, and for each measure the number of values, their sum, minimum and maximum.
        self._groups: dict[tuple[str, ...], list[Any]] = {}
        self.columns = list(query.columns or header)
        self.rows = 0
        self.matched = 0
        self.sample: list[str] = []

    def add(self, row: Sequence[str]) -> Sequence[str] | None:
        """Count a row. Return its chosen cells, or None if the row does not match the pattern.

        Raises:
            ToolError: The file has too many groups.
        """
        self.rows += 1
        if self._pattern is not None:
            text = ",".join(row) if self._pattern_cell is None else _cell(row, self._pattern_cell)
            if not self._pattern.is_valid(text):
                return None
        self.matched += 1
        if self._query.is_grouped:
            self._group(row)
        chosen = [_cell(row, index) for index in self._chosen] if self._chosen else row
        if len(self.sample) < SAMPLE_ROWS:
            self.sample.append(",".join(chosen)[:SAMPLE_CHARACTERS])
        return chosen

    def groups(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and rows of the table of groups. The largest group comes first."""
        columns = [*self._query.group_by, "count"]
        columns += [f"{kind}_{name}" for name in self._query.measures for kind in _MEASURES]
        found = sorted(self._groups.items(), key=lambda item: (-item[1][0], item[0]))
        return columns, [[*key, count, *map(_number, _shown(measures))] for key, (count, *measures) in found]

    def saved_counts(self) -> dict[str, Any]:
        return {"rows": self.rows, "matched": self.matched, "sample": self.sample}

    def saved_groups(self) -> list[Any]:
        """Return the groups as JSON values. Decimals become strings, because JSON numbers would lose precision."""
        return [
            [list(key), count, [[count_of, *map(_saved, numbers)] for count_of, *numbers in measures]]
            for key, (count, *measures) in self._groups.items()
        ]

    def restore(self, counts: dict[str, Any], groups: list[Any]) -> None:
        self.rows, self.matched, self.sample = counts["rows"], counts["matched"], list(counts["sample"])
        self._groups = {
            tuple(key): [count, *([count_of, *map(_restored, numbers)] for count_of, *numbers in measures)]
            for key, count, measures in groups
        }
        self._key_characters = sum(len(cell) for key in self._groups for cell in key)

    def _group(self, row: Sequence[str]) -> None:
        key = tuple(_cell(row, index) for index in self._key)
        group = self._groups.get(key)
        if group is None:
            self._key_characters += sum(map(len, key))
            if len(self._groups) >= GROUPS_MAX or self._key_characters > GROUPS_CHARACTERS_MAX:
                limit = f"{GROUPS_MAX} groups or {GROUPS_CHARACTERS_MAX} characters of group names"
                raise ToolError(f"the file has more than {limit}: group by other columns, or filter with pattern")
            group = self._groups[key] = [0, *([0, None, None, None] for _ in self._measured)]
        group[0] += 1
        for measure, index in zip(group[1:], self._measured, strict=True):
            text = _cell(row, index).strip()
            if _NUMBER.fullmatch(text):
                value, (count, total, least, most) = Decimal(text), measure
                measure[:] = count + 1, value, value, value
                if count:
                    measure[1:] = _DECIMAL.add(total, value), min(least, value), max(most, value)


def _index(header: Sequence[str], name: str) -> int:
    if name in header:
        return header.index(name)
    shown = ", ".join(header)[:SAMPLE_CHARACTERS]
    raise ToolError(f"the file has no column {name!r}{did_you_mean(name, header)}. Its columns are: {shown}")


def _compiled(pattern: str) -> jsonschema_rs.Draft202012Validator | None:
    if not pattern:
        return None
    limits = jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES_MAX, dfa_size_limit=_PATTERN_BYTES_MAX)
    try:
        return jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=limits)
    except (jsonschema_rs.ValidationError, ValueError):
        raise ToolError(
            f"the pattern {pattern!r} is malformed or too large: look-around and back-references are not supported"
        ) from None


def _cell(row: Sequence[str], index: int) -> str:
    return row[index] if index < len(row) else ""


def _shown(measures: Sequence[Sequence[Any]]) -> list[Decimal | None]:
    return [
        each
        for count, total, least, most in measures
        for each in (total, _DECIMAL.divide(total, Decimal(count)) if count else None, least, most)
    ]


def _saved(value: Decimal | None) -> str | None:
    return None if value is None else str(value)


def _restored(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


def _number(value: Decimal | None) -> float | int | None:
    if value is None:
        return None
    is_exact = abs(value) < _EXACT and value == value.to_integral_value()
    return int(value) if is_exact else float(value)
