"""Runs the notifier: `python -m pawl.notifier`."""

from __future__ import annotations

import asyncio

from pawl.notifier.channels.rules import ChannelKind
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.senders import Emails, SignedPosts
from pawl.notifier.deliveries.store import PostgresDeliveries
from pawl.notifier.inbox import bus as notifications_bus
from pawl.notifier.inbox.intake import JetStreamLifecycle
from pawl.notifier.inbox.store import SCHEMA, PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.notifier.preferences.store import PostgresPreferences
from pawl.notifier.settings import NotifierSettings
from pawl.notifier.wiring import wire
from pawl.server.db.erasures import ErasureWork
from pawl.server.egress.client import GuardedEgress, read_egress_file
from pawl.server.egress.mail import read_smtp_url
from pawl.server.identity.credentials import gone
from pawl.server.identity.key_sync import KeySyncClient
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load


async def main(stop: asyncio.Event) -> None:
    settings = load(NotifierSettings)
    async with Service("notifier", settings) as service:
        database = await service.open_database()
        await service.create_schema(database, SCHEMA)
        # Required for API keys that are stored in job-store. Keys from a file and the local key work without it.
        job_store = await service.open_channel("job_store", settings.job_store_address, optional=True)
        bus = await service.open_bus()

        egress = GuardedEgress(read_egress_file(settings.egress_file))
        store, queue = PostgresStore(database, settings.public_url), PostgresDeliveries(database)
        mail_server = read_smtp_url(settings.smtp_url.get_secret_value()) if settings.smtp_url else None
        parts = wire(
            store=store,
            channels=PostgresChannels(database),
            queue=queue,
            preferences=PostgresPreferences(database),
            senders={
                ChannelKind.WEBHOOK: SignedPosts(egress, service.clock),
                ChannelKind.EMAIL: Emails(mail_server, settings.mail_from, service.clock, settings.public_url),
            },
            sends_email=mail_server is not None,
            egress=egress,
            bus=bus,
            counters=PrometheusCounters(service.metrics),
            clock=service.clock,
            ids=service.ids,
            key_is_gone=gone(settings, service.clock, lambda: service.key_rows),
        )
        await notifications_bus.listen(bus, parts.subscriptions.wake)
        await notifications_bus.listen_for_viewers(bus, queue.note_viewers)
        JetStreamLifecycle(bus, parts.intake.take).start()
        for name, loop in parts.loops.items():
            service.background.start(name, loop)
        service.background.start("erasures", ErasureWork(job_store, store.erase, service.clock).run)
        rpc_server = service.rpc_server(KeySyncClient(job_store))
        parts.add_to(rpc_server)
        await service.serve(rpc_server, stop)


if __name__ == "__main__":
    run_service(main)
