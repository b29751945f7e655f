"""Adds to the usage figures in PostgreSQL, and reads today's tokens of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import astuple

from pawl.chassis.ids import StoreId
from pawl.job_store.ledger.rules.usage import UsageKey, Used
from pawl.job_store.ledger.store.columns import IS_HEAD, Statement, Write
from pawl.server.db.database import DatabaseAdapter

# The statements are built only from constants in this module.
# ruff: noqa: S608

FIGURES: Final = Used.__struct_fields__
KEY: Final = ", ".join(UsageKey.__struct_fields__)
NAMES: Final = f"{KEY}, {', '.join(FIGURES)}"
# Figures are capped so that sums over all rows stay in range.
COUNT_MAX: Final = 2**62
_SUMS: Final = ", ".join(f"least(u.{name}, {COUNT_MAX}) + excluded.{name}" for name in FIGURES)
# By code point, as transactions sort them, whatever the database's collation: both lock the rows in the same order.
_TEXTS: Final = frozenset({"store_id", "agent_name", "user_id", "tool_name", "model"})
ORDER: Final = ", ".join(f'{name} COLLATE "C"' if name in _TEXTS else name for name in UsageKey.__struct_fields__)
ON_CONFLICT: Final = f"ON CONFLICT ({KEY}, slot) DO UPDATE SET ({', '.join(FIGURES)}) = ROW({_SUMS})"
TOTALS: Final = ", ".join(f"least(sum({name}), {COUNT_MAX})::bigint AS {name}" for name in FIGURES)
_TYPES: Final = (*("text", "text", "date", "smallint", "text", "text", "text"), *["bigint"] * len(FIGURES))
_ADD: Final = Statement(
    f"""INSERT INTO job_store.usage_hours AS u (slot, {NAMES})
    SELECT pg_backend_pid() % 8, k.* FROM ({{rows}}) AS k ({NAMES}) {ON_CONFLICT}""",
    _TYPES,
    gathered=False,
)
_ADD_GUARDED: Final = Statement(
    f"""INSERT INTO job_store.usage_hours AS u (slot, {NAMES})
    SELECT pg_backend_pid() % 8, {KEY}, {TOTALS}
    FROM ({{rows}}) AS u (head, {NAMES}) WHERE {IS_HEAD} GROUP BY {KEY} ORDER BY {ORDER} {ON_CONFLICT}""",
    ("integer", *_TYPES),
    gathered=False,
)


def count(total: str) -> str:
    """Return SQL for a sum of figures, which may be unset or too large."""
    # An estimate that was too high in the hour before may make the sum negative.
    return f"greatest(least(coalesce({total}, 0), {COUNT_MAX}), 0)::bigint"


_TODAY: Final = f"""
SELECT {count("sum(input_tokens) + sum(output_tokens)")} AS tokens,
    ((now() AT TIME ZONE 'UTC')::date + 1)::timestamp AT TIME ZONE 'UTC' AS day_end_time
FROM job_store.usage_hours WHERE store_id = $1 AND agent_name = $2 AND day = (now() AT TIME ZONE 'UTC')::date
"""


def addition(added: Sequence[tuple[UsageKey, Used]], heads: Sequence[int] | None = None) -> Write:
    """Return the write that adds to the figures: without `heads`, in key order, to avoid deadlocks."""
    columns = list(zip(*((*astuple(key), *astuple(used)) for key, used in added), strict=True))
    return Write(_ADD, columns) if heads is None else Write(_ADD_GUARDED, [heads, *columns])


class PostgresAgentTokens(DatabaseAdapter):
    async def today(self, store_id: StoreId, name: str) -> tuple[int, datetime]:
        """Return the tokens that an agent has used today (UTC), and when the day ends."""
        record = (await self._database.fetch(_TODAY, store_id, name))[0]
        return record["tokens"], record["day_end_time"]
