"""Rate limits in PostgreSQL, with the generic cell rate algorithm on the database clock.

A row holds the time at which its rate will be fully available again. A call moves this time forward by the interval of
one call. The call is refused if the time would then be more than a minute ahead. If the time is already further ahead,
the clock was set back after the row was written, and the rate counts as unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.chassis.ids import StoreId
from pawl.server.db.database import DatabaseAdapter
from pawl.tool_registry.policy.rules.gate import Exceeded, Rate

_UNUSED_AT: Final = """
CASE WHEN r.unused_at > clock_timestamp() + interval '61 seconds' THEN clock_timestamp() ELSE r.unused_at END
"""
_TAKE: Final = f"""
INSERT INTO tool_registry.rates AS r (store_id, name, unused_at)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => 60.0 / $3))
ON CONFLICT (store_id, name) DO UPDATE
SET unused_at = greatest({_UNUSED_AT}, clock_timestamp()) + make_interval(secs => 60.0 / $3)
WHERE {_UNUSED_AT} + make_interval(secs => 60.0 / $3) <= clock_timestamp() + interval '60 seconds 1 millisecond'
RETURNING true
"""  # noqa: S608  # constants only
_WAIT: Final = """
SELECT extract(epoch FROM unused_at - clock_timestamp())::double precision - 60 + 60.0 / $3
FROM tool_registry.rates WHERE store_id = $1 AND name = $2
"""
_FORGET: Final = "DELETE FROM tool_registry.rates WHERE unused_at < now() - interval '1 hour'"


class PostgresRateLimits(DatabaseAdapter):
    async def take(self, store_id: StoreId, rates: Sequence[Rate]) -> None:
        """Count one call against all rates, or against none of them.

        Raises:
            Exceeded: One of the rates is used up.
            DependencyUnavailable: The call may or may not have been counted.
        """
        connect = self._database.acquire if len(rates) == 1 else self._database.transaction
        async with connect() as connection:
            # Lock in a fixed order, so that concurrent calls do not deadlock.
            for rate in sorted(rates, key=lambda rate: rate.name):
                arguments = (store_id, rate.name, float(rate.per_minute))
                if not await connection.fetchval(_TAKE, *arguments):
                    wait = await connection.fetchval(_WAIT, *arguments)
                    raise Exceeded(rate, max(0.0, wait or 0.0))

    async def forget(self) -> None:
        await self._database.execute(_FORGET)
