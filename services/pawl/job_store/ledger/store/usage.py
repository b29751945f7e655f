"""The use of agents in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import astuple

from pawl.chassis.db.database import DatabaseAdapter
from pawl.chassis.ids import StoreId
from pawl.event.v1 import agent_pb2, run_pb2
from pawl.job_store.ledger.rules.usage import UsageKey, Used
from pawl.job_store.ledger.store.columns import Statement, Write
from pawl.values import Usage

# The statements are made from constants of this module only.
# ruff: noqa: S608

_FIGURES: Final = Used.__struct_fields__
_NAMES: Final = ", ".join(("store_id", "agent_name", "day", "user_id", *_FIGURES))
# What is beyond that is not counted: the sums of all users must be numbers, too.
_COUNT_MAX: Final = 2**62
_SUMS: Final = ", ".join(f"least(u.{name}, {_COUNT_MAX}) + excluded.{name}" for name in _FIGURES)
_ADD: Final = Statement(
    f"""INSERT INTO job_store.usage_days AS u (slot, {_NAMES})
    SELECT pg_backend_pid() % 8, k.* FROM ({{rows}}) AS k ({_NAMES})
    ON CONFLICT (store_id, agent_name, day, user_id, slot) DO UPDATE SET ({", ".join(_FIGURES)}) = ROW({_SUMS})""",
    ("text", "text", "date", "text", *["bigint"] * len(_FIGURES)),
    gathered=False,
)


def _count(total: str) -> str:
    # An answer that was estimated too high on the day before may leave less than nothing.
    return f"greatest(least(coalesce({total}, 0), {_COUNT_MAX}), 0)::bigint"


_OF_AGENT: Final = f"""
SELECT day, count(DISTINCT user_id) AS users, {", ".join(f"{_count(f'sum({n})')} AS {n}" for n in _FIGURES)}
FROM job_store.usage_days
WHERE store_id = $1 AND agent_name = $2 AND day > (now() AT TIME ZONE 'UTC')::date - $3::integer
GROUP BY day ORDER BY day DESC
"""


_TODAY: Final = f"""
SELECT {_count("sum(input_tokens) + sum(output_tokens)")} AS tokens,
    ((now() AT TIME ZONE 'UTC')::date + 1)::timestamp AT TIME ZONE 'UTC' AS day_end_time
FROM job_store.usage_days WHERE store_id = $1 AND agent_name = $2 AND day = (now() AT TIME ZONE 'UTC')::date
"""


def addition(counts: Sequence[tuple[UsageKey, Used]]) -> Write:
    """Return what adds to counts, which are in the order of their keys: so nobody deadlocks."""
    return Write(_ADD, list(zip(*((*astuple(key), *astuple(used)) for key, used in counts), strict=True)))


class PostgresUsage(DatabaseAdapter):
    """What was used."""

    async def of_agent(self, store_id: StoreId, name: str, *, days: int) -> Sequence[agent_pb2.AgentUsage]:
        """Return the use of an agent on each of the last days on which there was any, the newest first."""
        return [
            agent_pb2.AgentUsage(
                day=record["day"].isoformat(),
                runs=record["runs"],
                users=record["users"],
                usage=run_pb2.Usage(**{name: record[name] for name in Usage.__struct_fields__}),
            )
            for record in await self._database.fetch(_OF_AGENT, store_id, name, days)
        ]

    async def today(self, store_id: StoreId, name: str) -> tuple[int, datetime]:
        """Return the tokens that an agent has used today, and when the day ends."""
        record = (await self._database.fetch(_TODAY, store_id, name))[0]
        return record["tokens"], record["day_end_time"]
