"""The job store: `python -m pawl.job_store`."""

from __future__ import annotations

from datetime import timedelta

from pawl.chassis.lifecycle import Stop, run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load
from pawl.job.v1.ledger_pb2_grpc import add_LedgerServiceServicer_to_server
from pawl.job_store.adapters.announcer import NatsAnnouncer
from pawl.job_store.adapters.attention import PostgresAttentionBook
from pawl.job_store.adapters.attic import PostgresAttic
from pawl.job_store.adapters.journal import PostgresJournal
from pawl.job_store.adapters.leases import PostgresLeases
from pawl.job_store.adapters.lifecycle_stream import JetStreamLifecycle
from pawl.job_store.adapters.metrics import CountedLeases, PrometheusMeter
from pawl.job_store.adapters.outbox import PostgresOutbox
from pawl.job_store.adapters.reads import PostgresReads
from pawl.job_store.adapters.upkeep import PostgresCensus, PostgresOfferBook
from pawl.job_store.app.group_commit import GroupCommit
from pawl.job_store.app.ledger import Ledger
from pawl.job_store.app.sweeps import (
    CensusTaker,
    ClockSweep,
    OfferSweep,
    QuarantineSweep,
    Relay,
    Retention,
    RetentionSweep,
)
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.rpc.messages import encode_event
from pawl.job_store.rpc.servicer import LedgerServicer
from pawl.job_store.settings import UNSENT_HOURS_MIN, JobStoreSettings


async def main(stop: Stop) -> None:
    """Serve until `stop`."""
    settings = load(JobStoreSettings)
    async with Service("job_store", settings) as service:
        database = await service.open_database()
        await database.migrate("job_store", "pawl.job_store.adapters.sql.migrations")
        bus = await service.open_bus()

        meter = PrometheusMeter(service.metrics)
        announcer = NatsAnnouncer(bus)
        relay = Relay(PostgresOutbox(database), JetStreamLifecycle(bus), meter)
        group_commit = await service.enter(
            GroupCommit(
                PostgresJournal(database, service.ids, encode_event, keeps_lifecycle=bus.is_configured),
                announcer,
                meter,
                monotonic=service.clock.monotonic,
                lifecycle_written=relay.wake,
            )
        )
        places = PlaceLimits(per_store=settings.active_runs_per_store, per_user=settings.active_runs_per_user)
        leases = PostgresLeases(database, places, crashes_max=settings.crashes_max)
        ledger = Ledger(
            group_commit=group_commit,
            leases=CountedLeases(leases, service.metrics),
            reads=PostgresReads(database),
            offer_book=PostgresOfferBook(database),
            attention_book=PostgresAttentionBook(database),
            announcer=announcer,
            crashes_max=settings.crashes_max,
        )
        retention = Retention(
            requests_seconds=timedelta(hours=settings.request_retention_hours).total_seconds(),
            unsent_seconds=timedelta(hours=max(settings.lifecycle_resend_hours, UNSENT_HOURS_MIN)).total_seconds(),
            sent_seconds=timedelta(hours=settings.lifecycle_resend_hours).total_seconds(),
            events_seconds=timedelta(days=settings.event_retention_days).total_seconds(),
            conversations_seconds=timedelta(days=settings.conversation_retention_days).total_seconds(),
            interval_seconds=settings.retention_interval_seconds,
        )

        service.background.start("relay", relay.run)
        service.background.start("offers", OfferSweep(ledger, service.clock).run)
        service.background.start("clock", ClockSweep(leases, service.clock).run)
        service.background.start("quarantine", QuarantineSweep(ledger, meter, service.clock).run)
        service.background.start("retention", RetentionSweep(PostgresAttic(database), service.clock, retention).run)
        service.background.start("census", CensusTaker(PostgresCensus(database, places), meter, service.clock).run)

        server = service.rpc_server()
        server.add(
            add_LedgerServiceServicer_to_server,
            LedgerServicer(
                ledger,
                queue_max=settings.conversation_queue_max,
                store_queue_max=settings.queued_runs_per_store,
                store_places=settings.active_runs_per_store,
            ),
            service_only=True,
        )
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
