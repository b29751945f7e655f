"""What must hold of what users are told by webhooks, judged by what came to their receivers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from pawl.event.v1 import event_pb2, run_pb2
from pawl.notifier.domain.delivery import DeliveryState
from pawl.notifier.domain.notification import NotificationKind
from tests.simulation.history import ChannelAct
from tests.simulation.notifier_rows import ChannelRow, DeliveryRow
from tests.simulation.record import Record, run_state
from tests.simulation.reference import ENDED

_HAPPENED = {
    "run.completed": "COMPLETED",
    "run.failed": "FAILED",
    "run.cancelled": "CANCELLED",
    "run.expired": "EXPIRED",
}


def what_was_asked_for_arrives(record: Record) -> Iterator[str]:
    """I15: each end that a channel asked for has been received, or was given up, and that was said."""
    taken = {(each.url, _event_id(each.body)) for each in record.history.received if each.is_taken}
    rows = record.tables.notifier
    by_event = {(row.channel_id, _event_id(row.body)): row for row in rows.deliveries.values()}
    for user_id, channel, since in _steady(record):
        disabled = bool(channel.channel.disable_reason) and _is_notified_of(record, channel)
        for event in _ends(record, user_id):
            state = run_state(event.run_changed.run.state)
            if channel.channel.kinds and NotificationKind(f"run_{state.lower()}") not in channel.channel.kinds:
                continue
            is_old = record.written_at(event.run_id, event.seq) <= since
            row = by_event.get((channel.channel.channel_id, event.event_id))
            is_said = disabled or (row is not None and _is_given_up(record, row))
            if not (is_old or is_said or (channel.channel.url, event.event_id) in taken):
                yield f"{channel.channel.url} was not told that {event.run_id} is {state}, and nobody says so"


def _steady(record: Record) -> Iterator[tuple[str, ChannelRow, float]]:
    """Yield channels that their users left alone, with whose they are, and since when they are there."""
    acts = record.history.channel_acts
    changed = {act.channel_id for act in acts if act.kind in {"disable", "delete"}}
    for act in acts:
        row = record.tables.notifier.channels.get(act.channel_id)  # type: ignore[call-overload]
        if act.kind == "create" and act.end is not None and act.channel_id not in changed and row is not None:
            yield act.user_id, row, act.end


def _ends(record: Record, user_id: str) -> Iterator[event_pb2.RunEvent]:
    """Yield the ends of a user's runs that are told, of conversations that were neither muted nor erased."""
    acts = record.history.channel_acts
    silent = {act.conversation_id for act in acts if act.kind == "erase"}
    silent |= {act.conversation_id for act in acts if act.kind == "mute" and act.user_id == user_id}
    for run_id, log in record.logs.items():
        event = log[-1]
        run = event.run_changed.run
        is_told = run.stop_cause != run_pb2.STOP_CAUSE_SUPERSEDED and not run.parent_run_id and not run.generation
        is_silent = record.runs[run_id].conversation_id in silent
        if run_state(run.state) in ENDED and is_told and run.user_id == user_id and not is_silent:
            yield event


def _is_given_up(record: Record, row: DeliveryRow) -> bool:
    told = {(event.type, event.delivery_id) for event in record.tables.notifier.told}
    return row.state is DeliveryState.DEAD and bool(row.last_error) and ("delivery.dead", row.delivery_id) in told


def _is_notified_of(record: Record, channel: ChannelRow) -> bool:
    """Return whether it was said that a channel was disabled: to its user, too, unless a test of theirs has done it."""
    rows = record.tables.notifier
    ended = [event.delivery_id for event in rows.told if event.type == "channel.disabled"]
    tests = {row.delivery_id for row in rows.deliveries.values() if row.number is None}
    of_it = [row for row in rows.deliveries.values() if row.channel_id == channel.channel.channel_id]
    if any(row.delivery_id in tests.intersection(ended) for row in of_it):
        return True
    return any(
        note.draft.kind is NotificationKind.CHANNEL_DISABLED and note.draft.channel_id == channel.channel.channel_id
        for note in rows.notes.values()
    )


def deliveries_are_always_the_same(record: Record) -> Iterator[str]:
    """Whatever is tried again has the same id and the same bytes, and is signed."""
    bodies: dict[str, set[bytes]] = defaultdict(set)
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in record.history.received:
        bodies[each.webhook_id].add(each.body)
        notification_id = _data(each.body).get("notification_id", "")
        if notification_id:
            ids[each.url, notification_id].add(each.webhook_id)
        if not each.is_signed:
            yield f"{each.webhook_id} came to {each.url} without a signature of its channel"
    for webhook_id, different in bodies.items():
        if len(different) > 1:
            yield f"{webhook_id} has come with {len(different)} bodies"
    for (url, notification_id), several in ids.items():
        if len(several) > 1:
            yield f"{notification_id} has come to {url} as {sorted(several)}"


def each_event_is_told_once(record: Record) -> Iterator[str]:
    """I15: however often an event came, an inbox has it once."""
    counts = Counter(
        (row.draft.inbox.user_id, row.draft.event_id)
        for row in record.tables.notifier.notes.values()
        if row.draft.kind is not NotificationKind.CHANNEL_DISABLED
    )
    for (user_id, event_id), count in counts.items():
        if count > 1:
            yield f"{user_id} was told {count} times of {event_id}"


def success_is_not_told_before(record: Record) -> Iterator[str]:
    """What a receiver is told has happened, and a delivery is delivered once its receiver has taken it."""
    written = {event.event_id: event for log in record.logs.values() for event in log}
    for each in record.history.received:
        said = _HAPPENED.get(msgspec.json.decode(each.body)["type"])
        if said is None:
            continue
        event = written[_event_id(each.body)]
        at = record.written_at(event.run_id, event.seq)
        if run_state(event.run_changed.run.state) != said or at > each.time:
            yield f"{each.url} was told at {each.time:.3f} that {event.run_id} is {said}"
    taken = {each.webhook_id for each in record.history.received if each.is_taken}
    rows = record.tables.notifier
    delivered = {row.delivery_id for row in rows.deliveries.values() if row.state is DeliveryState.DELIVERED}
    delivered |= {event.delivery_id for event in rows.told if event.type == "delivery.delivered"}
    for delivery_id in sorted(delivered - taken):
        yield f"{delivery_id} is said to be delivered, and its receiver has not taken it"


def deliveries_end(record: Record) -> Iterator[str]:
    """After some days nothing waits to be tried, or to be told to who listens on the bus."""
    rows = record.tables.notifier
    for row in rows.deliveries.values():
        if row.due_time is not None:
            yield f"{row.delivery_id} waits after {row.tries} tries"
    if rows.events:
        yield f"{len(rows.events)} events of channels were not told"


def each_try_was_claimed(record: Record) -> Iterator[str]:
    """No delivery is tried more often than it was claimed to be."""
    claims = Counter(str(claim.delivery_id) for claim in record.tables.notifier.claims if not claim.is_lost)
    for webhook_id, count in Counter(each.webhook_id for each in record.history.received).items():
        if count > claims[webhook_id]:
            yield f"{webhook_id} came {count} times, and was claimed {claims[webhook_id]} times"


def deleted_channels_are_told_nothing(record: Record) -> Iterator[str]:
    """Once the deletion of a channel is acknowledged, no try for it begins."""
    deleted = {act.channel_id: act.end for act in _done(record, "delete")}
    for claim in record.tables.notifier.claims:
        end = deleted.get(claim.channel_id)
        if end is not None and claim.time > end:
            yield f"{claim.delivery_id} was tried at {claim.time:.3f}, and its channel was deleted at {end:.3f}"


def mutes_and_erasures_hold(record: Record) -> Iterator[str]:
    """No try begins of what tells of a conversation that is muted, unless asked for, or that was erased."""
    unmuted = {(act.user_id, act.conversation_id): act.begin for act in _acts(record, "unmute")}
    muted = {(act.user_id, act.conversation_id): act.end for act in _done(record, "mute")}
    erased = {act.conversation_id: act.end for act in _done(record, "erase")}
    for claim in record.tables.notifier.claims:
        key = (claim.user_id, claim.conversation_id)
        since, until = muted.get(key), unmuted.get(key, float("inf"))
        is_due = claim.is_asked or claim.is_lost
        if since is not None and since < claim.time < until and not is_due:
            yield f"{claim.delivery_id} was tried at {claim.time:.3f}, and {key} was muted at {since:.3f}"
        end = erased.get(claim.conversation_id)
        if end is not None and claim.time > end:
            yield f"{claim.delivery_id} was tried at {claim.time:.3f}, and {key} was erased at {end:.3f}"


def _acts(record: Record, kind: str) -> list[ChannelAct]:
    return [act for act in record.history.channel_acts if act.kind == kind]


def _done(record: Record, kind: str) -> list[ChannelAct]:
    return [act for act in _acts(record, kind) if act.end is not None]


def _data(body: bytes | str) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.json.decode(body)["data"]
    return data


def _event_id(body: bytes | str) -> str:
    return str(_data(body).get("event_id", ""))


CHECKERS = (
    what_was_asked_for_arrives,
    deliveries_are_always_the_same,
    each_event_is_told_once,
    success_is_not_told_before,
    deliveries_end,
    each_try_was_claimed,
    deleted_channels_are_told_nothing,
    mutes_and_erasures_hold,
)
