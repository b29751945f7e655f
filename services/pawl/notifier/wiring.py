"""The notifier put together: ports in, its servicer and its loops out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pawl.chassis.clock import Clock
from pawl.chassis.rpc_server import RpcServer
from pawl.notifier.app.intake import Intake
from pawl.notifier.app.ports import Announcer, Counters, Store
from pawl.notifier.app.publication import Publication, forget_old
from pawl.notifier.app.subscription import Subscriptions
from pawl.notifier.rpc.servicer import HEARTBEAT_SECONDS, Notify
from pawl.notify.v1.notify_pb2_grpc import add_NotifyServiceServicer_to_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifier:
    """A notifier that is not running yet: feed `intake`, start `loops`, add the servicer to a server."""

    intake: Intake
    subscriptions: Subscriptions
    servicer: Notify
    loops: Mapping[str, Callable[[], Awaitable[None]]]

    def add_to(self, server: RpcServer) -> None:
        """Have a server answer for it."""
        server.add(add_NotifyServiceServicer_to_server, self.servicer)


def wire(
    *,
    store: Store,
    announcer: Announcer,
    counters: Counters,
    clock: Clock,
    keep_days: float,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> Notifier:
    """Return a notifier over these ports."""
    publication = Publication(store, announcer, counters)
    subscriptions = Subscriptions(store, counters)
    return Notifier(
        intake=Intake(store, counters, on_new=publication.wake),
        subscriptions=subscriptions,
        servicer=Notify(store, subscriptions, heartbeat_seconds=heartbeat_seconds),
        loops={
            "publication": publication.run,
            "subscriptions": subscriptions.run,
            "retention": lambda: forget_old(store, clock, keep_days=keep_days),
        },
    )
