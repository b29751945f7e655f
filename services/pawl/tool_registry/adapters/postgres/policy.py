"""The policy of the registry over PostgreSQL, put together."""

from __future__ import annotations

from dataclasses import dataclass

from pawl.chassis.clock import Clock
from pawl.chassis.database import Database
from pawl.tool_registry.adapters.postgres.audit import PostgresAuditLog
from pawl.tool_registry.adapters.postgres.rates import PostgresRateLimits
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.policy import CallPolicy
from pawl.tool_registry.app.policy.result_cache import ResultCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The parts that enforce policy, write the audit chain, and read it."""

    calls: CallPolicy
    audit: AuditTrail
    log: PostgresAuditLog


def policy_parts(database: Database, clock: Clock, *, store_calls_per_minute: int = 0) -> PolicyParts:
    """Return the parts of one process; `store_calls_per_minute` 0 means any number."""
    log = PostgresAuditLog(database)
    audit = AuditTrail(log, clock.now)
    calls = CallPolicy(
        limits=PostgresRateLimits(database),
        audit=audit,
        cache=ResultCache(clock.monotonic),
        store_calls_per_minute=store_calls_per_minute,
    )
    return PolicyParts(calls=calls, audit=audit, log=log)
