"""Counts model calls, events and outages, and reserves tokens in budgets, in PostgreSQL.

A rate's row holds the time at which the rate will be fully available again (generic cell rate algorithm). A call may be
made if at least one request or token is left. It is then counted in full. Large calls therefore need not wait longer
than small ones. A time more than an hour ahead means that the clock was set back after the row was written. The rate
then counts as unused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from asyncpg import Record

from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import run_pb2
from pawl.job.v1.agents_pb2 import TokenBudget
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.values import WaitKind

# The statements are built only from constants in this module.
# ruff: noqa: S608

_UNUSED_TIME: Final = """greatest(clock_timestamp(), CASE
    WHEN r.unused_time <= clock_timestamp() + interval '1 hour 1 second' THEN r.unused_time ELSE clock_timestamp()
END)"""
_TAKE: Final = f"""
INSERT INTO job_store.model_rates AS r (store_id, name, unused_time)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (store_id, name) DO UPDATE
SET unused_time = least({_UNUSED_TIME} + make_interval(secs => $3), clock_timestamp() + interval '1 hour')
WHERE $5 OR {_UNUSED_TIME} + make_interval(secs => $4) <= clock_timestamp() + interval '60 seconds 1 millisecond'
RETURNING extract(epoch FROM r.unused_time - clock_timestamp())::double precision / 60
"""
_WAIT: Final = """
SELECT extract(epoch FROM unused_time - clock_timestamp())::double precision - 60 + $3
FROM job_store.model_rates WHERE store_id = $1 AND name = $2
"""
_START: Final = """
INSERT INTO job_store.model_calls (store_id, model_call_id, user_id, agent_name, tokens, expire_time, ended)
VALUES ($1, $2, $3, $4, $5, now() + make_interval(secs => $6), false)
ON CONFLICT (store_id, model_call_id) DO NOTHING RETURNING true
"""
_END: Final = """
INSERT INTO job_store.model_calls AS c (store_id, model_call_id, user_id, agent_name, tokens, expire_time, ended)
VALUES ($1, $2, '', '', 0, now() + interval '10 minutes', true)
ON CONFLICT (store_id, model_call_id) DO UPDATE
SET tokens = 0, expire_time = excluded.expire_time, ended = true WHERE NOT c.ended RETURNING true
"""
_LOCK_BUDGETS: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.model_calls'), hashtext($1))"
# The sums exclude the new call, because a statement does not see its own changes.
_RESERVE: Final = f"""
WITH started AS ({_START})
SELECT EXISTS (SELECT FROM started) AS is_new, coalesce(sum(tokens), 0)::bigint AS of_store,
    coalesce(sum(tokens) FILTER (WHERE user_id = $3), 0)::bigint AS of_user,
    coalesce(sum(tokens) FILTER (WHERE agent_name = $4), 0)::bigint AS of_agent
FROM job_store.model_calls
WHERE store_id = $1 AND NOT ended AND expire_time > clock_timestamp()
"""
_REPORT_SERVERS: Final = """
INSERT INTO job_store.model_servers (store_id, model_server, report_time)
SELECT '', name, now() FROM unnest($1::text[]) AS k (name) ORDER BY name
ON CONFLICT (store_id, model_server) DO UPDATE SET report_time = excluded.report_time
"""
# A clock that was set back must not keep a server closed.
_IS_CLOSED: Final = "r.closed_until > now() AND r.closed_until < now() + interval '11 seconds'"
_ADD_OUTAGES: Final = """
INSERT INTO job_store.model_outages AS r (store_id, model_server, outages, closed_until)
VALUES ('', $1, $2, now() + make_interval(secs => $3)) ON CONFLICT (store_id, model_server)
DO UPDATE SET outages = least(r.outages + excluded.outages, 1000000), closed_until = excluded.closed_until
"""
_END_OUTAGE: Final = "DELETE FROM job_store.model_outages WHERE store_id = '' AND model_server = $1"
_ATTEMPT: Final = f"""
UPDATE job_store.model_outages AS r SET closed_until = now() + make_interval(secs => $2)
WHERE store_id = '' AND model_server = $1 AND NOT ({_IS_CLOSED}) RETURNING true
"""
_OUTAGE: Final = """
SELECT outages, greatest(0, extract(epoch FROM closed_until - now()))::double precision AS closed_seconds
FROM job_store.model_outages WHERE store_id = '' AND model_server = $1
"""
_RESERVED_OF: Final = {
    run_pb2.WAIT_KIND_STORE_DAILY_TOKENS: "of_store",
    run_pb2.WAIT_KIND_STORE_MONTHLY_TOKENS: "of_store",
    run_pb2.WAIT_KIND_AGENT_QUOTA: "of_agent",
}
_MINUTE_SECONDS: Final = 60.0
_HOUR_SECONDS: Final = 3600.0
_PAUSE_SECONDS_MAX: Final = 60.0


class Rate(NamedTuple):
    """A limit per minute, and how much of it a call uses. For limits on model servers, the store id is empty."""

    store_id: StoreId
    name: str
    per_minute: int
    used: int

    @property
    def seconds(self) -> float:
        """The number of seconds in which the rate allows as much as the call uses."""
        return max(-_HOUR_SECONDS, min(_HOUR_SECONDS, self.unit_seconds * self.used))

    @property
    def limit(self) -> str:
        """The name of the limit in metrics."""
        return f"{'model' if self.store_id else 'server'}_{self.name.split()[0]}_per_minute"

    @property
    def unit_seconds(self) -> float:
        return _MINUTE_SECONDS / self.per_minute


class Exceeded(Exception):  # Raising it rolls back the transaction.
    def __init__(self, rate: Rate, wait_seconds: float) -> None:
        super().__init__(rate.name)
        self.rate = rate
        self.wait_seconds = wait_seconds


class UsedUp(Exception):  # It rolls back the transaction.
    def __init__(self, budget: TokenBudget) -> None:
        super().__init__(budget.kind)
        self.budget = budget


class OpenCall(NamedTuple):
    """A model call. `tokens` are reserved in budgets for at most `seconds_max`."""

    store_id: StoreId
    model_call_id: str
    user_id: UserId = UserId("")
    agent_name: str = ""
    tokens: int = 0
    seconds_max: float = 0.0


def part_of(budget: TokenBudget) -> tuple[str, float]:
    """Return the limit's name in metrics, and the fraction of it that is used."""
    return WaitKind(budget.kind).name.lower(), budget.tokens_used / budget.tokens_max


def _checked(budgets: Sequence[TokenBudget], reserved: Record) -> dict[str, float]:
    """Return the fraction of each budget that is used.

    Raises:
        UsedUp: A budget has no tokens left. If there are several, the error names one that stays used up longest.
    """

    def left(budget: TokenBudget) -> int:
        return budget.tokens_max - budget.tokens_used - int(reserved[_RESERVED_OF.get(budget.kind, "of_user")])

    refusing = [each for each in budgets if left(each) <= 0]
    if refusing:
        raise UsedUp(max(refusing, key=lambda each: (each.tokens_max <= each.tokens_used, each.end_time.seconds)))
    return dict(map(part_of, budgets))


class PostgresModels(DatabaseAdapter):
    async def pause_seconds(self, store_id: StoreId, per_second: int, events: int) -> float:
        """Count a store's events. Return how many seconds to wait until their rate is within the limit again."""
        rate = (store_id, "events", events / per_second, 0.0, True)
        minutes: float = await self._database.fetchval(_TAKE, *rate)
        return min(max(0.0, minutes * _MINUTE_SECONDS - 1.0), _PAUSE_SECONDS_MAX)

    async def take(
        self,
        call: OpenCall,
        rates: Sequence[Rate],
        budgets: Callable[[Connection], Awaitable[Sequence[TokenBudget]]] | None = None,
        *,
        ended: bool = False,
    ) -> Mapping[str, float]:
        """Count a call against all rates, and reserve its tokens in the budgets that `budgets` returns. Idempotent.

        If a rate or budget is used up, do not count the call at all, unless it has ended. The end of a call releases
        its reservation. Return the fraction of each limit that is used.

        Raises:
            Exceeded: One of the rates is used up.
            UsedUp: One of the budgets is used up or reserved.
        """
        if ended and not rates:
            await self._database.execute(_END, *call[:2])
            return {}
        async with self._database.transaction() as connection:
            used = dict[str, float]()
            if budgets is None:
                is_new = await connection.fetchval(_END if ended else _START, *(call[:2] if ended else call))
            else:
                await connection.execute(_LOCK_BUDGETS, call.store_id)
                # A call's tokens are counted as used before its reservation ends, so the two are read in this order.
                (reserved,) = await connection.fetch(_RESERVE, *call)
                if is_new := reserved["is_new"]:
                    used = _checked(await budgets(connection), reserved)
            if not is_new:
                return {}
            # Lock in a fixed order, so that concurrent calls do not deadlock.
            for rate in sorted(rates):
                key = (rate.store_id, rate.name)
                part = await connection.fetchval(_TAKE, *key, rate.seconds, rate.unit_seconds, ended)
                if part is None:
                    wait = await connection.fetchval(_WAIT, *key, rate.unit_seconds)
                    raise Exceeded(rate, max(0.001, wait or 0.0))
                used[rate.limit] = part
        return used

    async def report_servers(self, names: Collection[str]) -> None:
        """Record that an agent-loop has these model servers."""
        await self._database.execute(_REPORT_SERVERS, sorted(names))

    async def end_outage(self, model_server: str) -> None:
        await self._database.execute(_END_OUTAGE, model_server)

    async def add_outages(self, model_server: str, outages: int, closed_seconds: float) -> None:
        await self._database.execute(_ADD_OUTAGES, model_server, outages, closed_seconds)

    async def attempt(self, model_server: str, seconds: float) -> bool:
        """Return whether the caller may make the next attempt.

        If it may, no other caller may make one for `seconds`.
        """
        return bool(await self._database.fetchval(_ATTEMPT, model_server, seconds))

    async def outage(self, model_server: str) -> tuple[int, float]:
        """Return the number of consecutive outages, and for how many more seconds the server must not be called."""
        row = await self._database.fetchrow(_OUTAGE, model_server)
        return (0, 0.0) if row is None else (row["outages"], row["closed_seconds"])
