"""Counts model calls per minute, and outages of model servers, in PostgreSQL.

A rate's row holds the time at which the rate will be fully available again (generic cell rate algorithm). A call may be
made if one request or token is left, and is then counted in full, so that large calls need not wait longer than small
ones. A time more than an hour ahead means that the clock was set back after the row was written. The rate then counts
as unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pawl.chassis.ids import StoreId
from pawl.server.db.database import DatabaseAdapter

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
RETURNING true
"""
_WAIT: Final = """
SELECT extract(epoch FROM unused_time - clock_timestamp())::double precision - 60 + $3
FROM job_store.model_rates WHERE store_id = $1 AND name = $2
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
_MINUTE_SECONDS: Final = 60.0
_HOUR_SECONDS: Final = 3600.0


class Rate(NamedTuple):
    """A limit per minute, and how much of it a call uses. For limits of model servers, the store ID is empty."""

    store_id: StoreId
    name: str
    per_minute: int
    used: int

    @property
    def seconds(self) -> float:
        """The time in seconds for which the call uses the whole rate."""
        return max(-_HOUR_SECONDS, min(_HOUR_SECONDS, self.unit_seconds * self.used))

    @property
    def unit_seconds(self) -> float:
        return _MINUTE_SECONDS / self.per_minute


class Exceeded(Exception):  # Raising it rolls back the transaction.
    def __init__(self, rate: Rate, wait_seconds: float) -> None:
        super().__init__(rate.name)
        self.rate = rate
        self.wait_seconds = wait_seconds


class PostgresModels(DatabaseAdapter):
    async def take(self, rates: Sequence[Rate], *, ended: bool = False) -> None:
        """Count a call against all rates. If one rate is used up, count it against none, unless the call has ended.

        Raises:
            Exceeded: One of the rates is used up.
        """
        async with self._database.transaction() as connection:
            # Lock in a fixed order, so that concurrent calls do not deadlock.
            for rate in sorted(rates):
                key = (rate.store_id, rate.name)
                if not await connection.fetchval(_TAKE, *key, rate.seconds, rate.unit_seconds, ended):
                    wait = await connection.fetchval(_WAIT, *key, rate.unit_seconds)
                    raise Exceeded(rate, max(0.001, wait or 0.0))

    async def end_outage(self, model_server: str) -> None:
        await self._database.execute(_END_OUTAGE, model_server)

    async def add_outages(self, model_server: str, outages: int, closed_seconds: float) -> None:
        await self._database.execute(_ADD_OUTAGES, model_server, outages, closed_seconds)

    async def attempt(self, model_server: str, seconds: float) -> bool:
        """Return whether the caller may make the next attempt. If so, no other caller may do so for `seconds`."""
        return bool(await self._database.fetchval(_ATTEMPT, model_server, seconds))

    async def outage(self, model_server: str) -> tuple[int, float]:
        """Return the number of consecutive outages, and the seconds for which the server remains closed."""
        row = await self._database.fetchrow(_OUTAGE, model_server)
        return (0, 0.0) if row is None else (row["outages"], row["closed_seconds"])
