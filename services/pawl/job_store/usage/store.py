"""Reads usage figures from PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from asyncpg import Record

from pawl.job_store.ledger.store.usage import FIGURES, count
from pawl.job_store.usage.rules import Dimension, Period, Selection, days
from pawl.server.db.database import DatabaseAdapter

# The statements are built only from constants in this module.
# ruff: noqa: S608

# A row's time, negated because the newest comes first, and its dimensions.
Position: TypeAlias = tuple[int, tuple[str, ...]]

COLUMN_OF: Final = {
    Dimension.STORE: "store_id",
    Dimension.USER: "user_id",
    Dimension.AGENT: "agent_name",
    Dimension.TOOL: "tool_name",
    Dimension.MODEL: "model",
}
_HOURS: Final = "((day - date '1970-01-01') * 24 + hour)"
_PLACE_OF: Final = {Period.WHOLE: "0", Period.HOUR: f"-{_HOURS}", Period.DAY: "-(day - date '1970-01-01')"}
_SUMS: Final = ", ".join(f"{count(f'sum({name})')} AS {name}" for name in FIGURES)
_FIRST: Final = -(2**31)


class PostgresUsage(DatabaseAdapter):
    async def rows(self, selection: Selection, *, after: Position | None, rows_max: int) -> Sequence[Record]:
        """Return rows ordered by `place` (hours or days since 1970, negated), then by the requested dimensions."""
        arguments: list[Any] = []

        def given(value: object) -> str:
            arguments.append(value)
            return f"${len(arguments)}"

        columns = [COLUMN_OF[each] for each in selection.by]
        chosen = {
            "store_id": selection.store_id,
            "user_id": selection.user_id,
            "agent_name": selection.agent_name,
            "tool_name": selection.tool_name,
            "model": selection.model,
        }
        first, last = days(selection)
        conditions = [f"day BETWEEN {given(first)} AND {given(last)}"]
        conditions += [f"{name} = {given(value)}" for name, value in chosen.items() if value]
        conditions += ["tool_name <> ''"] if selection.is_of_tools else []
        conditions += ["model <> ''"] if selection.is_of_models else []
        if selection.period is Period.HOUR:
            hours = (int(time.timestamp()) // 3600 for time in (selection.start, selection.end))
            low, high = map(given, hours)
            conditions.append(f"hour >= 0 AND {_HOURS} >= {low}::integer AND {_HOURS} < {high}::integer")
        position, named = after or (_FIRST, ("",) * len(columns)), ", ".join(["place", *columns])
        places = ", ".join(
            f"{given(value)}::{type_}"
            for value, type_ in zip((position[0], *position[1]), ("integer", *["text"] * len(columns)), strict=True)
        )
        statement = f"""
        SELECT * FROM (
            SELECT {_PLACE_OF[selection.period]} AS {named}, count(DISTINCT user_id) AS users, {_SUMS}
            FROM job_store.usage_hours WHERE {" AND ".join(conditions)} GROUP BY {named}
        ) AS figures WHERE ROW({named}) > ROW({places}) ORDER BY {named} LIMIT {given(rows_max)}::integer
        """
        return await self._database.fetch(statement, *arguments)
