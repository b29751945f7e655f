"""Builds the notifier from its dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import Clock
from pawl.notifier.channels.rpc import ChannelServicer
from pawl.notifier.channels.rules import ChannelKind
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.deliveries import ChannelSender, Deliveries
from pawl.notifier.deliveries.store import PostgresDeliveries
from pawl.notifier.inbox.bus import Publication, forget_old
from pawl.notifier.inbox.intake import Intake
from pawl.notifier.inbox.rpc import HEARTBEAT_SECONDS, Notify
from pawl.notifier.inbox.store import Added, PostgresStore
from pawl.notifier.inbox.subscription import Subscriptions
from pawl.notifier.metrics import PrometheusCounters
from pawl.notifier.preferences.rpc import PreferenceServicer
from pawl.notifier.preferences.store import PostgresPreferences
from pawl.notify.v1.channel_pb2_grpc import add_ChannelServiceServicer_to_server
from pawl.notify.v1.notify_pb2_grpc import add_NotifyServiceServicer_to_server
from pawl.notify.v1.preference_pb2_grpc import add_PreferenceServiceServicer_to_server
from pawl.server.bus.connection import Bus
from pawl.server.egress.client import Egress
from pawl.server.rpc.server import RpcServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifier:
    """An assembled notifier that is not running yet.

    To run it, feed `intake`, start `loops`, and add the servicers to a server.
    """

    intake: Intake
    subscriptions: Subscriptions
    deliveries: Deliveries
    add_to: Callable[[RpcServer], None]
    loops: Mapping[str, Callable[[], Awaitable[None]]]


def wire(
    *,
    store: PostgresStore,
    channels: PostgresChannels,
    queue: PostgresDeliveries,
    preferences: PostgresPreferences,
    senders: Mapping[ChannelKind, ChannelSender],
    sends_email: bool,
    egress: Egress,
    bus: Bus,
    counters: PrometheusCounters,
    clock: Clock,
    ids: IdSource,
    key_is_gone: Callable[[Principal], bool],
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> Notifier:
    publication = Publication(store, bus, counters)
    subscriptions = Subscriptions(store, counters)

    def on_new(added: Added) -> None:
        publication.wake()
        if added.deliveries:
            deliveries.wake()

    def on_notice() -> None:
        publication.wake(channels_changed=True)
        deliveries.wake()

    def add_to(server: RpcServer) -> None:
        notify = Notify(store, subscriptions, heartbeat_seconds=heartbeat_seconds)
        server.add(add_NotifyServiceServicer_to_server, notify)
        of_users = ChannelServicer(channels, egress, clock, ids, sends_email=sends_email, on_due=deliveries.wake)
        server.add(add_ChannelServiceServicer_to_server, of_users)
        server.add(add_PreferenceServiceServicer_to_server, PreferenceServicer(preferences, on_change=deliveries.wake))

    deliveries = Deliveries(queue, senders, counters, clock, on_notice=on_notice, key_is_gone=key_is_gone)
    return Notifier(
        intake=Intake(store, counters, on_new=on_new),
        subscriptions=subscriptions,
        deliveries=deliveries,
        add_to=add_to,
        loops={
            "deliveries": deliveries.run,
            "deliveries.count": deliveries.count,
            "publication": publication.run,
            "subscriptions": subscriptions.run,
            "retention": lambda: forget_old(store, clock),
        },
    )
