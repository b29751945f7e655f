"""Starts the job-store service: `python -m pawl.job_store`."""

from __future__ import annotations

import asyncio

import pawl.server.bus  # noqa: F401  # before the modules that import nats
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.store.journal import is_sharded
from pawl.job_store.settings import JobStoreSettings
from pawl.job_store.sweeps import RetentionPeriods
from pawl.job_store.wiring import on_postgres
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load
from pawl.values import Feature


async def main(stop: asyncio.Event) -> None:
    settings = load(JobStoreSettings)
    limits = Limits(
        store_queue_max=settings.queued_runs_per_store,
        slots=SlotLimits(per_store=settings.active_runs_per_store, per_user=settings.active_runs_per_user),
        conversation_retention_days=settings.conversation_retention_days,
    )
    retention = RetentionPeriods(events_seconds=settings.event_retention_days * 86_400)
    async with Service("job_store", settings) as service:
        database = await service.open_database()
        await service.create_schema(database, "job_store", append_only=("key_events", "settings_changes"))
        bus = await service.open_bus()

        parts = on_postgres(
            database,
            bus,
            limits,
            retention,
            clock=service.clock,
            ids=service.ids,
            metrics=service.metrics,
            keeps_lifecycle=bus.is_configured,
            forced_off={Feature.RUNS} if settings.runs == "off" else (),
            one_store=await is_sharded(database),
        )
        # Before the first request, so that no disabled feature is available even for a moment.
        await parts.settings.refresh()
        await service.enter(parts.group_commit)
        for name, loop in parts.loops.items():
            service.background.start(name, loop)
        server = service.rpc_server(parts.keys)
        parts.add_to(server)
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
