"""Faults of what users are told by webhooks."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.planted import Mutant

_DELIVERY = "pawl.notifier.domain.delivery"
_SENDER = "pawl.notifier.adapters.webhook_sender"
_QUEUE = "tests.simulation.channels"

_EVERYWHERE = ("tests.simulation.notifier", "_PLAYED = 0.4", "_PLAYED = 1.0")
"""So that no seed is played in vain."""

_OF_CHANNELS = (
    Mutant(
        name="who_stops_forgets_what_was_claimed",
        module=_DELIVERY,
        text="    if due.was_claimed:\n        return Plan()\n",
        instead='    if due.was_claimed:\n        return Plan(state=DeliveryState.SKIPPED, reason="it was tried")\n',
        checker="what_was_asked_for_arrives",
    ),
    Mutant(
        name="each_try_has_its_own_bytes",
        module=_SENDER,
        text="body=attempt.body.encode(),",
        instead='body=attempt.body.encode() + b" " * attempt.tries,',
        checker="deliveries_are_always_the_same",
    ),
    Mutant(
        name="each_try_has_its_own_id",
        module=_SENDER,
        text="message_id = attempt.candidate.delivery_id\n",
        instead='message_id = f"{attempt.candidate.delivery_id}-{attempt.tries}"\n',
        checker="deliveries_are_always_the_same",
    ),
    Mutant(
        name="each_copy_of_an_event_is_news",
        module="pawl.notifier.domain.announcement",
        text="notification_id=notification_id(change.event_id),",
        instead='notification_id=NotificationId(f"ntf_{id(change)}"),',
        checker="each_event_is_told_once",
    ),
    Mutant(
        name="waiting_is_told_as_success",
        module="pawl.notifier.domain.announcement",
        text="return _draft(change, NotificationKind.INPUT_NEEDED,",
        instead="return _draft(change, NotificationKind.RUN_COMPLETED,",
        checker="success_is_not_told_before",
    ),
    Mutant(
        name="what_failed_counts_as_delivered",
        module=_DELIVERY,
        text="_OK: Final = range(200, 300)",
        instead="_OK: Final = range(200, 600)",
        checker="success_is_not_told_before",
    ),
    Mutant(
        name="tries_have_no_end",
        module=_DELIVERY,
        text="not is_test and tries <= len(_PAUSES):\n        pause = _PAUSES[tries - 1] *",
        instead="not is_test:\n        pause = _PAUSES[-1] *",
        checker="deliveries_end",
    ),
    Mutant(
        name="tries_are_doubled",
        module="pawl.notifier.app.deliveries",
        text="outcome = LOST if attempt.is_lost else await self._senders[kind_of(attempt.url)].send(attempt)",
        instead="send = self._senders[kind_of(attempt.url)].send\n"
        "            outcome = LOST if attempt.is_lost else [await send(attempt) for _ in range(2)][0]",
        checker="each_try_was_claimed",
    ),
    Mutant(
        name="deleted_channels_live_on",
        module=_QUEUE,
        text="        del self._rows.channels[channel_id]\n        for row in",
        instead="        for row in () and",
        checker="deleted_channels_are_told_nothing",
    ),
    Mutant(
        name="mutes_are_overheard",
        module=_DELIVERY,
        text="    if due.is_muted:\n",
        instead="    if False:\n",
        checker="mutes_and_erasures_hold",
    ),
    Mutant(
        name="what_was_erased_comes_again",
        module="tests.simulation.notifier_rows",
        text="key in known or (draft.inbox.store_id, draft.conversation_id) in self.erased",
        instead="key in known",
        checker="mutes_and_erasures_hold",
    ),
)

OF_CHANNELS = tuple(replace(mutant, also=(*mutant.also, _EVERYWHERE)) for mutant in _OF_CHANNELS)
