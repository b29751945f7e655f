"""pawl.job.v1.TriggerLedgerService: translates, nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pawl.chassis.ids import RunId, StoreId, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.rpc_kinds import Context
from pawl.chassis.translate import Translator
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import trigger_pb2
from pawl.job.v1 import triggers_pb2 as pb
from pawl.job.v1 import triggers_pb2_grpc
from pawl.job_store.app.ports import Limits
from pawl.job_store.app.triggers import Triggers
from pawl.job_store.domain.deliver import Deliver
from pawl.job_store.domain.schedules import owner_of
from pawl.job_store.domain.triggers import (
    DATA_BYTES_MAX,
    Authentication,
    MailPlace,
    TriggerDefinition,
    TriggerKey,
    TriggerRow,
)
from pawl.job_store.rpc import operations
from pawl.job_store.rpc.events import FIRE
from pawl.job_store.rpc.messages import timestamp
from pawl.job_store.rpc.schedule_servicer import OWNER, fire_message, owner_of_message
from pawl.values import Overlap, RunState

CLAIMED_MAX: Final = 64
_LANE_CHARACTERS_MAX: Final = 64
_EVENT_ID: Final = re.compile(r"[!-~]{1,200}")

_WIRE: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field} has no known value", field=unknown.field),
    defaults={Overlap: Overlap.ALLOW, Authentication: Authentication.SIGNATURE},
)
_DEFINITION: Final = _WIRE.struct(TriggerDefinition, trigger_pb2.TriggerDefinition, field="definition")

_PLACE: Final = _WIRE.struct(MailPlace, pb.MailPlace)


class TriggerLedgerServicer(triggers_pb2_grpc.TriggerLedgerServiceServicer):
    """Serves triggers."""

    def __init__(self, triggers: Triggers, limits: Limits) -> None:
        self._triggers = triggers
        self._limits = limits

    async def PutTrigger(self, request: pb.PutTriggerRequest, context: Context) -> pb.PutTriggerResponse:
        asked = _definition(request.definition)
        place = _PLACE.read(request.place) if request.HasField("place") else None
        owner = owner_of_message(request.owner)
        row, secret = await self._triggers.put(owner, asked, place, must_exist=request.must_exist)
        return pb.PutTriggerResponse(trigger=_message(row), secret=secret)

    async def GetTrigger(self, request: pb.GetTriggerRequest, context: Context) -> pb.GetTriggerResponse:
        row, states = await self._triggers.get(
            check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id"), check_id(request.name, "name")
        )
        return pb.GetTriggerResponse(trigger=_message(row, states))

    async def ListTriggers(self, request: pb.ListTriggersRequest, context: Context) -> pb.ListTriggersResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        return pb.ListTriggersResponse(triggers=map(_message, await self._triggers.list(store_id, user_id)))

    async def PauseTrigger(self, request: pb.PauseTriggerRequest, context: Context) -> pb.PauseTriggerResponse:
        name, note = check_id(request.name, "name"), request.note
        row = await self._triggers.pause(owner_of_message(request.owner), name, note, paused=request.paused)
        return pb.PauseTriggerResponse(trigger=_message(row))

    async def DeleteTrigger(self, request: pb.DeleteTriggerRequest, context: Context) -> pb.DeleteTriggerResponse:
        await self._triggers.delete(
            check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id"), check_id(request.name, "name")
        )
        return pb.DeleteTriggerResponse()

    async def RotateTriggerSecret(
        self, request: pb.RotateTriggerSecretRequest, context: Context
    ) -> pb.RotateTriggerSecretResponse:
        secret = await self._triggers.rotate(
            check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id"), check_id(request.name, "name")
        )
        return pb.RotateTriggerSecretResponse(secret=secret)

    async def CheckWebhook(self, request: pb.CheckWebhookRequest, context: Context) -> pb.CheckWebhookResponse:
        store_id, trigger_id = check_id(request.store_id, "store_id"), check_id(request.trigger_id, "trigger_id")
        row, event_id = await self._triggers.check(store_id, trigger_id, request.headers, request.body)
        return pb.CheckWebhookResponse(due=_due(row), event_id=event_id)

    async def ClaimEvents(self, request: pb.ClaimEventsRequest, context: Context) -> pb.ClaimEventsResponse:
        if not 1 <= request.events_max <= CLAIMED_MAX:
            raise InvalidField(f"events_max is from 1 to {CLAIMED_MAX}", field="events_max")
        claimed, wait_seconds = await self._triggers.claim(request.events_max)
        events = [
            pb.ClaimedEvent(
                due=_due(each.trigger),
                event=pb.TriggerEvent(
                    event_id=each.lane.event_id,
                    lane=each.lane.lane,
                    data=each.lane.data,
                    conversation_key=each.lane.conversation_key,
                ),
            )
            for each in claimed
        ]
        return pb.ClaimEventsResponse(events=events, wait_seconds=wait_seconds)

    async def ClaimMailboxes(self, request: pb.ClaimMailboxesRequest, context: Context) -> pb.ClaimMailboxesResponse:
        if not 1 <= request.mailboxes_max <= CLAIMED_MAX:
            raise InvalidField(f"mailboxes_max is from 1 to {CLAIMED_MAX}", field="mailboxes_max")
        if len(request.busy_store_ids) > CLAIMED_MAX:
            raise InvalidField(f"at most {CLAIMED_MAX} stores are busy", field="busy_store_ids")
        busy_stores = [StoreId(check_id(each, "busy_store_ids")) for each in request.busy_store_ids]
        claimed, wait_seconds = await self._triggers.claim_mailboxes(request.mailboxes_max, busy_stores)
        mailboxes = [
            pb.DueMailbox(due=_due(row), place=pb.MailPlace(uid_validity=row.uid_validity, uid=row.last_uid))
            for row in claimed
        ]
        return pb.ClaimMailboxesResponse(mailboxes=mailboxes, wait_seconds=wait_seconds)

    async def NoteMailbox(self, request: pb.NoteMailboxRequest, context: Context) -> pb.NoteMailboxResponse:
        due = request.due
        await self._triggers.note_mailbox(
            TriggerKey(check_id(due.owner.store_id, "store_id"), check_id(due.trigger_id, "trigger_id")),
            due.generation,
            _PLACE.read(request.place) if request.HasField("place") else None,
            request.reason,
            has_more=request.has_more,
        )
        return pb.NoteMailboxResponse()

    async def FireTrigger(self, request: pb.FireTriggerRequest, context: Context) -> pb.FireTriggerResponse:
        due, event = request.due, request.event
        if not _EVENT_ID.fullmatch(event.event_id):
            raise InvalidField("event_id must be 1 to 200 visible characters of ASCII", field="event.event_id")
        if len(event.lane) > _LANE_CHARACTERS_MAX:
            raise InvalidField(f"lane has at most {_LANE_CHARACTERS_MAX} characters", field="event.lane")
        if len(event.data) > DATA_BYTES_MAX:
            raise TooLarge(f"an event has at most {DATA_BYTES_MAX} bytes", field="event.data")
        store_id = check_id(due.owner.store_id, "store_id")
        fired = await self._triggers.fire(
            Deliver(
                trigger=TriggerKey(store_id, check_id(due.trigger_id, "trigger_id")),
                generation=due.generation,
                event_id=event.event_id,
                lane=event.lane if event.HasField("lane") else None,
                data=event.data,
                conversation_key=event.conversation_key,
                submit=operations.submit(request.message, self._limits) if request.HasField("message") else None,
                refusal=request.refusal,
                claimed=request.claimed,
                mail=_PLACE.read(request.mail) if request.HasField("mail") else None,
                skipped=request.skipped,
            ),
            request.ByteSize(),
        )
        fire = None if fired.fire is None else FIRE.write(fired.fire)
        return pb.FireTriggerResponse(fire=fire, duplicate=fired.duplicate)


def _definition(message: trigger_pb2.TriggerDefinition) -> TriggerDefinition:
    check_id(message.name, "definition.name")
    definition = _DEFINITION.read(message)
    check_labels(definition.labels, "definition.labels")
    return definition


def _message(row: TriggerRow, states: Mapping[RunId, RunState] | None = None) -> trigger_pb2.Trigger:
    return trigger_pb2.Trigger(
        definition=_DEFINITION.write(row.definition),
        trigger_id=row.trigger_id,
        create_time=timestamp(row.create_time),
        pause_time=None if row.pause_time is None else timestamp(row.pause_time),
        pause_note=row.pause_note,
        self_paused=row.self_paused,
        failures=row.failures,
        unreachable_time=None if row.unreachable_time is None else timestamp(row.unreachable_time),
        unreachable_reason=row.unreachable_reason,
        refused_count=row.refused_count,
        refused_time=None if row.refused_time is None else timestamp(row.refused_time),
        refused_reason=row.refused_reason,
        fires=[fire_message(fire, states) for fire in row.fires] if states is not None else (),
    )


def _due(row: TriggerRow) -> pb.DueTrigger:
    return pb.DueTrigger(
        owner=OWNER.write(owner_of(row)),
        definition=_DEFINITION.write(row.definition),
        trigger_id=row.trigger_id,
        generation=row.generation,
    )
