"""The ledger's triggers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final, cast

import grpc

from pawl.agent_loop.adapters.schedule_ledger import caller_of, owner_message
from pawl.agent_loop.app.public_values import (
    Delivery,
    DueMailbox,
    DueTrigger,
    MailPlace,
    ScheduledMessage,
    TriggerEvent,
)
from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.chassis.rows import read_each
from pawl.chassis.rpc_client import translated
from pawl.event.v1 import schedule_pb2, trigger_pb2
from pawl.job.v1 import triggers_pb2 as pb
from pawl.job.v1 import triggers_pb2_grpc
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest
from pawl.values import Overlap

_OVERLAPS: Final = {schedule_pb2.ScheduleOverlap.Value(f"SCHEDULE_OVERLAP_{each.name}"): each for each in Overlap}

_FOLDER_ID_CHARACTERS: Final = 8


class TriggerLedgerClient:
    """A `TriggerLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = triggers_pb2_grpc.TriggerLedgerServiceStub(channel)

    async def put_trigger(
        self, caller: Principal, definition: object, place: MailPlace | None = None, *, must_exist: bool
    ) -> tuple[object, str]:
        asked = cast("trigger_pb2.TriggerDefinition", definition)
        request = pb.PutTriggerRequest(
            owner=owner_message(caller), definition=asked, must_exist=must_exist, place=_place(place)
        )
        response = await translated(self._stub.PutTrigger(request))
        return response.trigger, response.secret

    async def get_trigger(self, caller: Principal, name: str) -> object:
        request = pb.GetTriggerRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        return (await translated(self._stub.GetTrigger(request))).trigger

    async def list_triggers(self, caller: Principal) -> Sequence[object]:
        request = pb.ListTriggersRequest(store_id=caller.store_id, user_id=caller.user_id)
        return tuple((await translated(self._stub.ListTriggers(request))).triggers)

    async def pause_trigger(self, caller: Principal, name: str, note: str, *, paused: bool) -> object:
        request = pb.PauseTriggerRequest(owner=owner_message(caller), name=name, note=note, paused=paused)
        return (await translated(self._stub.PauseTrigger(request))).trigger

    async def delete_trigger(self, caller: Principal, name: str) -> None:
        request = pb.DeleteTriggerRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        await translated(self._stub.DeleteTrigger(request))

    async def rotate_trigger_secret(self, caller: Principal, name: str) -> str:
        request = pb.RotateTriggerSecretRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        return (await translated(self._stub.RotateTriggerSecret(request))).secret

    async def check_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[DueTrigger, str]:
        request = pb.CheckWebhookRequest(store_id=caller.store_id, trigger_id=trigger_id, headers=headers, body=body)
        response = await translated(self._stub.CheckWebhook(request))
        return _due(response.due), response.event_id

    async def claim_events(self, events_max: int) -> tuple[Sequence[tuple[DueTrigger, TriggerEvent]], float]:
        response = await translated(self._stub.ClaimEvents(pb.ClaimEventsRequest(events_max=events_max)))
        claimed = read_each("event", response.events, _claimed, lambda each: (each.due.trigger_id, each.event.event_id))
        return claimed, response.wait_seconds

    async def claim_mailboxes(
        self, mailboxes_max: int, *, busy_stores: Sequence[StoreId] = ()
    ) -> tuple[Sequence[DueMailbox], float]:
        request = pb.ClaimMailboxesRequest(mailboxes_max=mailboxes_max, busy_store_ids=busy_stores)
        response = await translated(self._stub.ClaimMailboxes(request))
        claimed = read_each("mailbox", response.mailboxes, _mailbox, lambda each: each.due.trigger_id)
        return claimed, response.wait_seconds

    async def note_mailbox(self, due: DueTrigger, place: MailPlace | None, *, reason: str, has_more: bool) -> None:
        document = cast("pb.DueTrigger", due.document)
        request = pb.NoteMailboxRequest(due=document, place=_place(place), reason=reason, has_more=has_more)
        await translated(self._stub.NoteMailbox(request))

    async def fire_trigger(
        self,
        due: DueTrigger,
        event: TriggerEvent,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        claimed: bool = False,
        mail: MailPlace | None = None,
        skipped: str = "",
    ) -> Delivery:
        request = pb.FireTriggerRequest(
            due=cast("pb.DueTrigger", due.document),
            event=pb.TriggerEvent(
                event_id=event.event_id, lane=event.lane, data=event.data, conversation_key=event.conversation_key
            ),
            claimed=claimed,
            message=message,
            refusal=refusal,
            mail=_place(mail),
            skipped=skipped,
        )
        response = await translated(self._stub.FireTrigger(request))
        fire = response.fire if response.HasField("fire") else None
        return Delivery(fire=fire, duplicate=response.duplicate)


def _due(message: pb.DueTrigger) -> DueTrigger:
    definition = message.definition
    return DueTrigger(
        caller=caller_of(message.owner),
        message=ScheduledMessage(
            text=definition.text,
            agent=definition.agent,
            labels=dict(definition.labels),
            conversation_key=definition.conversation_key,
        ),
        trigger_id=message.trigger_id,
        name=definition.name,
        conversation_pointer=definition.conversation_pointer,
        concurrency_pointer=definition.concurrency_pointer,
        debounce_seconds=definition.debounce_seconds,
        overlap=_OVERLAPS[definition.overlap],
        mailbox=definition.mailbox if definition.HasField("mailbox") else None,
        folder_id=_folder_id(definition.mailbox) if definition.HasField("mailbox") else "",
        document=message,
    )


def _claimed(message: pb.ClaimedEvent) -> tuple[DueTrigger, TriggerEvent]:
    return _due(message.due), _event(message.event)


def _mailbox(message: pb.DueMailbox) -> DueMailbox:
    place = MailPlace(uid_validity=message.place.uid_validity, uid=message.place.uid)
    return DueMailbox(trigger=_due(message.due), place=place)


def _folder_id(mailbox: trigger_pb2.MailboxSource) -> str:
    """Return the same for the same folder alone: another one may number its mails in the same way."""
    place = MailboxPlace.of(mailbox)
    named = json.dumps([place.host, place.port, place.plaintext, place.username, place.folder])
    return hashlib.sha256(named.encode()).hexdigest()[:_FOLDER_ID_CHARACTERS]


def _place(place: MailPlace | None) -> pb.MailPlace | None:
    return None if place is None else pb.MailPlace(uid_validity=place.uid_validity, uid=place.uid)


def _event(message: pb.TriggerEvent) -> TriggerEvent:
    return TriggerEvent(
        event_id=message.event_id,
        lane=message.lane if message.HasField("lane") else None,
        data=message.data,
        conversation_key=message.conversation_key,
    )
