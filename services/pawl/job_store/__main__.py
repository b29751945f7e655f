"""The job store: `python -m pawl.job_store`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from pawl.chassis.lifecycle import run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load
from pawl.job_store.app.ports import Limits
from pawl.job_store.app.sweeps import RetentionPeriods
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.settings import UNSENT_HOURS_MIN, JobStoreSettings
from pawl.job_store.wiring import on_postgres

_KEYS_DAYS: Final = 90.0
"""So long a key that has ended can still be listed."""


async def main(stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    settings = load(JobStoreSettings)
    limits = Limits(
        crashes_max=settings.crashes_max,
        queue_max=settings.conversation_queue_max,
        store_queue_max=settings.queued_runs_per_store,
        places=PlaceLimits(
            per_store=settings.active_runs_per_store,
            per_user=settings.active_runs_per_user,
            background_per_store=settings.active_jobs_per_store,
        ),
    )
    retention = RetentionPeriods(
        requests_seconds=timedelta(hours=settings.request_retention_hours).total_seconds(),
        unsent_seconds=timedelta(hours=max(settings.lifecycle_resend_hours, UNSENT_HOURS_MIN)).total_seconds(),
        sent_seconds=timedelta(hours=settings.lifecycle_resend_hours).total_seconds(),
        events_seconds=timedelta(days=settings.event_retention_days).total_seconds(),
        conversations_seconds=timedelta(days=settings.conversation_retention_days).total_seconds(),
        keys_seconds=timedelta(days=_KEYS_DAYS).total_seconds(),
        interval_seconds=settings.retention_interval_seconds,
    )
    async with Service("job_store", settings) as service:
        database = await service.open_database()
        await service.create_schema(database, "job_store", append_only=("key_events",))
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
        )
        await service.enter(parts.group_commit)
        for name, loop in parts.loops.items():
            service.background.start(name, loop)
        server = service.rpc_server(parts.keys)
        parts.add_to(server)
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
