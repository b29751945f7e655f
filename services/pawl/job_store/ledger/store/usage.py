"""Adds to the usage figures in PostgreSQL, and reads the tokens that count towards budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec.structs import astuple

from pawl.chassis.ids import StoreId, UserId
from pawl.job_store.ledger.rules.usage import UsageKey, Used, day_end, month_end
from pawl.job_store.ledger.store.columns import IS_HEAD, Statement, Write
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.values import Usage, WaitKind

# The statements are built only from constants in this module.
# ruff: noqa: S608

FIGURES: Final = Used.__struct_fields__
KEY: Final = ", ".join(UsageKey.__struct_fields__)
NAMES: Final = f"{KEY}, {', '.join(FIGURES)}"
# Figures are capped so that sums over all rows stay in range.
COUNT_MAX: Final = 2**62
# By code point, as transactions sort them, whatever the database's collation: both lock the rows in the same order.
_TEXTS: Final = frozenset({"store_id", "agent_name", "user_id", "tool_name", "model"})
ORDER: Final = ", ".join(f'{name} COLLATE "C"' if name in _TEXTS else name for name in UsageKey.__struct_fields__)


def on_conflict(figures: Sequence[str]) -> str:
    sums = ", ".join(f"least(u.{name}, {COUNT_MAX}) + excluded.{name}" for name in figures)
    return f"ON CONFLICT ({KEY}, slot) DO UPDATE SET ({', '.join(figures)}) = ROW({sums})"


def totals(figures: Sequence[str]) -> str:
    return ", ".join(f"least(sum({name}), {COUNT_MAX})::bigint AS {name}" for name in figures)


_KEY_TYPES: Final = ("text", "text", "date", "smallint", "text", "text", "text")
_INSERT: Final = "INSERT INTO job_store.usage_hours AS u (slot, {names}) SELECT pg_backend_pid() % 8, "


class _Additions(NamedTuple):
    """Statements that add to some of the figures, for rows with different keys. `guarded` checks `IS_HEAD`."""

    figures: tuple[str, ...]
    plain: Statement
    guarded: Statement


def _additions(figures: tuple[str, ...]) -> _Additions:
    names = f"{KEY}, {', '.join(figures)}"
    insert, types = _INSERT.format(names=names), (*_KEY_TYPES, *["bigint"] * len(figures))
    rest = f"WHERE {IS_HEAD} {on_conflict(figures)}"
    return _Additions(
        figures,
        Statement(f"{insert} k.* FROM ({{rows}}) AS k ({names}) {on_conflict(figures)}", types, gathered=False),
        Statement(f"{insert} {names} FROM ({{rows}}) AS u (head, {names}) {rest}", ("integer", *types), gathered=False),
    )


_OF_MODELS: Final = _additions(Usage.__struct_fields__)
_OF_TOOLS: Final = _additions(("calls_succeeded", "calls_failed", "calls_refused", "call_milliseconds"))
_OF_RUNS: Final = _additions(
    tuple(name for name in FIGURES if name not in {*_OF_MODELS.figures, *_OF_TOOLS.figures}),
)
_OF_ALL: Final = _additions(FIGURES)
# For rows of several heads, whose keys may be equal.
_ADD_SUMMED: Final = Statement(
    f"""{_INSERT.format(names=NAMES)} {KEY}, {totals(FIGURES)}
    FROM ({{rows}}) AS u (head, {NAMES}) WHERE {IS_HEAD} GROUP BY {KEY} ORDER BY {ORDER} {on_conflict(FIGURES)}""",
    ("integer", *_KEY_TYPES, *["bigint"] * len(FIGURES)),
    gathered=False,
)
_figures_of_models = attrgetter(*_OF_MODELS.figures)


def count(total: str) -> str:
    """Return SQL for a sum of figures that may be unset or too large."""
    # An estimate that was too high in the previous hour may make the sum negative.
    return f"greatest(least(coalesce({total}, 0), {COUNT_MAX}), 0)::bigint"


_TODAY: Final = f"""
SELECT {count("sum(input_tokens) + sum(output_tokens)")} AS tokens,
    ((now() AT TIME ZONE 'UTC')::date + 1)::timestamp AT TIME ZONE 'UTC' AS day_end_time
FROM job_store.usage_hours WHERE store_id = $1 AND agent_name = $2 AND day = (now() AT TIME ZONE 'UTC')::date
"""


_BUDGET_COLUMNS: Final = "store_id, user_id, day, tokens"
_BUDGET_TYPES: Final = ("text", "text", "date", "bigint")
_TOKENS_ADDED: Final = f"""INSERT INTO job_store.token_days AS t (slot, {_BUDGET_COLUMNS})
SELECT pg_backend_pid() % 8, u.store_id, k.user_id, u.day, {{tokens}}
FROM ({{{{rows}}}}) AS u ({{names}}) CROSS JOIN LATERAL (VALUES (''), (u.user_id)) AS k (user_id) {{rest}}
ON CONFLICT (store_id, user_id, day, slot)
DO UPDATE SET tokens = least(t.tokens, {COUNT_MAX}) + excluded.tokens"""
_TOKENS_SUM: Final = f"least(sum(u.tokens), {COUNT_MAX})::bigint"
_BY_KEY: Final = """GROUP BY u.store_id, k.user_id, u.day
ORDER BY u.store_id COLLATE "C", k.user_id COLLATE "C", u.day"""
_ADD_TOKENS: Final = Statement(
    _TOKENS_ADDED.format(tokens=_TOKENS_SUM, names=_BUDGET_COLUMNS, rest=_BY_KEY), _BUDGET_TYPES, gathered=False
)
_GUARDED_TOKENS: Final = {"names": f"head, {_BUDGET_COLUMNS}"}
_ADD_TOKENS_GUARDED: Final = Statement(
    _TOKENS_ADDED.format(tokens=_TOKENS_SUM, rest=f"WHERE {IS_HEAD} {_BY_KEY}", **_GUARDED_TOKENS),
    ("integer", *_BUDGET_TYPES),
    gathered=False,
)
# For a single row.
_ADD_TOKENS_ONCE: Final = Statement(
    _TOKENS_ADDED.format(tokens="u.tokens", rest=f"WHERE {IS_HEAD}", **_GUARDED_TOKENS),
    ("integer", *_BUDGET_TYPES),
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
    numbers = [None] * len(counts) if heads is None else heads
    rows = [(number, key, used) for number, (key, used) in zip(numbers, counts, strict=True)]
    kinds = {_OF_ALL: rows}
    if _are_of_one_run(rows):
        # PostgreSQL runs the last statement first: the rows are locked in key order.
        kinds = {
            _OF_TOOLS: [row for row in rows if row[1].tool_name],
            _OF_MODELS: [row for row in rows if row[1].model],
            _OF_RUNS: [row for row in rows if not (row[1].tool_name or row[1].model)],
        }
    writes: list[Write] = []
    for kind, of_kind in kinds.items():
        if of_kind:
            figures = attrgetter(*kind.figures)
            columns = list(
                zip(*((number, *astuple(key), *figures(used)) for number, key, used in of_kind), strict=True)
            )
            guarded = kind.guarded if len({*columns[0]}) == 1 else _ADD_SUMMED
            writes.append(Write(kind.plain, columns[1:]) if heads is None else Write(guarded, columns))
    tokens = [
        (number, key.store_id, key.user_id, key.day, used.total_tokens)
        for number, key, used in rows
        if used.total_tokens
    ]
    if tokens:
        columns = list(zip(*tokens, strict=True))
        guarded = _ADD_TOKENS_ONCE if len(tokens) == 1 else _ADD_TOKENS_GUARDED
        writes.append(Write(_ADD_TOKENS, columns[1:]) if heads is None else Write(guarded, columns))
    return writes


def _are_of_one_run(rows: Sequence[tuple[int | None, UsageKey, Used]]) -> bool:
    """Return whether the rows differ only in tool and model, and each row has only figures of its own kind."""
    starts = {(number, *astuple(key)[:5]) for number, key, _ in rows}
    return len(starts) == 1 and all(key.model or not any(_figures_of_models(used)) for _, key, used in rows)


class PostgresTokens(DatabaseAdapter):
    """Reads the tokens that count towards budgets."""

    async def today(self, store_id: StoreId, name: str, connection: Connection | None = None) -> tuple[int, datetime]:
        """Return how many tokens an agent has used today (UTC), and when the day ends."""
        record = (await (connection or self._database).fetch(_TODAY, store_id, name))[0]
        return record["tokens"], record["day_end_time"]

    async def tokens(
        self, store_id: StoreId, user_id: UserId, connection: Connection | None = None
    ) -> Mapping[WaitKind, tuple[int, datetime]]:
        """Return how many tokens the store and the user have used today and this month, and when these end (UTC)."""
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
