"""Adds to the usage figures in PostgreSQL, and reads the tokens that count towards budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import astuple

from pawl.chassis.ids import StoreId, UserId
from pawl.job_store.ledger.rules.usage import UsageKey, Used, day_end, month_end
from pawl.job_store.ledger.store.columns import IS_HEAD, Statement, Write
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.values import WaitKind

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
    """Return SQL for a sum of figures that may be unset or too large."""
    # An estimate that was too high in the hour before may make the sum negative.
    return f"greatest(least(coalesce({total}, 0), {COUNT_MAX}), 0)::bigint"


_TODAY: Final = f"""
SELECT {count("sum(input_tokens) + sum(output_tokens)")} AS tokens,
    ((now() AT TIME ZONE 'UTC')::date + 1)::timestamp AT TIME ZONE 'UTC' AS day_end_time
FROM job_store.usage_hours WHERE store_id = $1 AND agent_name = $2 AND day = (now() AT TIME ZONE 'UTC')::date
"""


_TOKENS_ADDED: Final = f"""INSERT INTO job_store.token_days AS t (slot, store_id, user_id, day, tokens)
SELECT pg_backend_pid() % 8, u.store_id, k.user_id, u.day, least(sum(u.tokens), {COUNT_MAX})::bigint
FROM ({{rows}}) AS u ({{names}}) CROSS JOIN LATERAL (VALUES (u.user_id), ('')) AS k (user_id){{guard}}
GROUP BY u.store_id, k.user_id, u.day ORDER BY u.store_id COLLATE "C", k.user_id COLLATE "C", u.day
ON CONFLICT (store_id, user_id, day, slot)
DO UPDATE SET tokens = least(t.tokens, {COUNT_MAX}) + excluded.tokens"""
_TOKEN_NAMES: Final = ("store_id", "user_id", "day", "tokens")
_TOKEN_TYPES: Final = ("text", "text", "date", "bigint")
_ADD_TOKENS: Final = Statement(
    _TOKENS_ADDED.format(rows="{rows}", names=", ".join(_TOKEN_NAMES), guard=""), _TOKEN_TYPES, gathered=False
)
_ADD_TOKENS_GUARDED: Final = Statement(
    _TOKENS_ADDED.format(rows="{rows}", names=", ".join(("head", *_TOKEN_NAMES)), guard=f" WHERE {IS_HEAD}"),
    ("integer", *_TOKEN_TYPES),
    gathered=False,
)
_TOKENS: Final = f"""
SELECT t.user_id, now() AS now, {count("sum(t.tokens)")} AS month,
    {count("sum(t.tokens) FILTER (WHERE t.day = today.day)")} AS day
FROM (SELECT (now() AT TIME ZONE 'UTC')::date AS day) AS today
CROSS JOIN (SELECT DISTINCT unnest(ARRAY['', $2::text])) AS k (user_id)
LEFT JOIN job_store.token_days AS t ON t.store_id = $1 AND t.user_id = k.user_id
    AND t.day BETWEEN date_trunc('month', today.day)::date AND today.day
GROUP BY t.user_id
"""


def additions(counts: Sequence[tuple[UsageKey, Used]], heads: Sequence[int] | None = None) -> list[Write]:
    """Return the writes that add to the figures. Without `heads`, they are in key order, to avoid deadlocks."""
    if not counts:
        return []
    numbers = [None] * len(counts) if heads is None else heads
    tokens = [
        (number, key.store_id, key.user_id, key.day, used.total_tokens)
        for number, (key, used) in zip(numbers, counts, strict=True)
        if used.total_tokens
    ]
    columns = list(zip(*((*astuple(key), *astuple(used)) for key, used in counts), strict=True))
    of_tokens = list(zip(*tokens, strict=True))
    if heads is None:
        return [Write(_ADD, columns), *([Write(_ADD_TOKENS, of_tokens[1:])] if tokens else [])]
    return [Write(_ADD_GUARDED, [heads, *columns]), *([Write(_ADD_TOKENS_GUARDED, of_tokens)] if tokens else [])]


class PostgresTokens(DatabaseAdapter):
    """Reads the tokens that count towards budgets."""

    async def today(self, store_id: StoreId, name: str, connection: Connection | None = None) -> tuple[int, datetime]:
        """Return how many tokens an agent has used today (UTC), and when the day ends."""
        record = (await (connection or self._database).fetch(_TODAY, store_id, name))[0]
        return record["tokens"], record["day_end_time"]

    async def tokens(
        self, store_id: StoreId, user_id: UserId, connection: Connection | None = None
    ) -> Mapping[WaitKind, tuple[int, datetime]]:
        """Return how many tokens the store and the user have used this day and month (UTC), and when these end."""
        records = await (connection or self._database).fetch(_TOKENS, store_id, user_id)
        rows = {row["user_id"]: row for row in records}
        now = next(iter(rows.values()))["now"]
        used = {each: (rows[each]["day"], rows[each]["month"]) if each in rows else (0, 0) for each in ("", user_id)}
        return {
            WaitKind.STORE_DAILY_TOKENS: (used[""][0], day_end(now)),
            WaitKind.STORE_MONTHLY_TOKENS: (used[""][1], month_end(now)),
            WaitKind.USER_DAILY_TOKENS: (used[user_id][0], day_end(now)),
            WaitKind.USER_MONTHLY_TOKENS: (used[user_id][1], month_end(now)),
        }
