"""Runs the notifier: `python -m pawl.notifier`."""

from __future__ import annotations

from pawl.chassis.lifecycle import Stop, run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load
from pawl.notifier.adapters import bus as notifications_bus
from pawl.notifier.adapters.lifecycle import JetStreamLifecycle
from pawl.notifier.adapters.metrics import PrometheusCounters
from pawl.notifier.adapters.postgres import MIGRATIONS, SCHEMA, PostgresStore
from pawl.notifier.app.intake import Intake
from pawl.notifier.app.publication import Publication, forget_old
from pawl.notifier.app.subscription import Subscriptions
from pawl.notifier.rpc import convert
from pawl.notifier.rpc.servicer import Notify
from pawl.notifier.settings import NotifierSettings
from pawl.notify.v1.notify_pb2_grpc import add_NotifyServiceServicer_to_server


async def main(stop: Stop) -> None:
    """Run until `stop`."""
    settings = load(NotifierSettings)
    async with Service("notifier", settings) as service:
        database = await service.open_database()
        await database.migrate(SCHEMA, MIGRATIONS)
        bus = await service.open_bus()

        store = PostgresStore(database)
        counters = PrometheusCounters(service.metrics)
        announcer = notifications_bus.NatsAnnouncer(bus, convert.to_proto)
        publication = Publication(store, announcer, counters)
        subscriptions = Subscriptions(store, counters)
        intake = Intake(store, counters, on_new=publication.wake)

        await notifications_bus.hear(bus, subscriptions.wake)
        JetStreamLifecycle(bus, intake.take).start()
        service.background.start("publication", publication.run)
        service.background.start("subscriptions", subscriptions.run)
        service.background.start(
            "retention", lambda: forget_old(store, service.clock, keep_days=settings.notifications_keep_days)
        )

        server = service.rpc_server()
        server.add(add_NotifyServiceServicer_to_server, Notify(store, subscriptions))
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
