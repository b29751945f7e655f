"""Runs the notifier: `python -m pawl.notifier`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from pawl.chassis.egress import GuardedEgress, read_egress_file
from pawl.chassis.erasures import ErasureWork
from pawl.chassis.key_sync import KeySyncClient
from pawl.chassis.lifecycle import run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load
from pawl.notifier.adapters import bus as notifications_bus
from pawl.notifier.adapters.lifecycle import JetStreamLifecycle
from pawl.notifier.adapters.metrics import PrometheusCounters
from pawl.notifier.adapters.postgres import MIGRATIONS, SCHEMA, PostgresStore
from pawl.notifier.adapters.webhook_sender import SignedPosts
from pawl.notifier.adapters.webhooks import PostgresWebhooks
from pawl.notifier.domain.webhook import TRIES_MAX_AT_ONCE
from pawl.notifier.rpc import convert
from pawl.notifier.settings import NotifierSettings
from pawl.notifier.wiring import wire


async def main(stop: asyncio.Event) -> None:
    """Run until `stop`."""
    settings = load(NotifierSettings)
    async with Service("notifier", settings) as service:
        database = await service.open_database()
        await service.migrate(database, SCHEMA, MIGRATIONS)
        bus = await service.open_bus()

        # Names are resolved in threads, and one that is resolved slowly must not hold up others: there is a thread
        # for each try, which keeps its places for as long as its name is looked up.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(TRIES_MAX_AT_ONCE["all"]))
        egress = GuardedEgress(read_egress_file(settings.egress_file))
        store = PostgresStore(database)
        parts = wire(
            store=store,
            webhooks=PostgresWebhooks(database),
            sender=SignedPosts(egress, service.clock),
            egress=egress,
            announcer=notifications_bus.NatsAnnouncer(bus, convert.MESSAGE.write),
            counters=PrometheusCounters(service.metrics),
            clock=service.clock,
            ids=service.ids,
            keep_days=settings.notifications_keep_days,
        )
        await notifications_bus.hear(bus, parts.subscriptions.wake)
        JetStreamLifecycle(bus, parts.intake.take).start()
        for name, loop in parts.loops.items():
            service.background.start(name, loop)
        # For keys: who has one of a file, or the local one, needs no job-store.
        job_store = await service.open_channel("job_store", settings.job_store_address, optional=True)
        service.background.start("erasures", ErasureWork(job_store, store.erase, service.clock).run)
        server = service.rpc_server(KeySyncClient(job_store))
        parts.add_to(server)
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
