"""Servicers for pawl.agent.v1.TriggerService (forwarded by agent-loop) and pawl.job.v1.TriggerLedgerService."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import RunId, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Translator
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import trigger_pb2
from pawl.job.v1 import triggers_pb2 as ledger
from pawl.job.v1 import triggers_pb2_grpc
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc import operations
from pawl.job_store.ledger.rpc.events import FIRE
from pawl.job_store.ledger.rpc.messages import timestamp
from pawl.job_store.ledger.rules.deliver import Deliver
from pawl.job_store.schedules.rpc import OWNER, fire_message, owner_of_user
from pawl.job_store.schedules.rules import check_note, owner_of
from pawl.job_store.triggers.rules import (
    DATA_BYTES_MAX,
    Authentication,
    MailPosition,
    TriggerDefinition,
    TriggerKey,
    TriggerRow,
)
from pawl.job_store.triggers.triggers import Triggers
from pawl.values import Overlap, RunState

CLAIMED_MAX: Final = 64
_LANE_CHARACTERS_MAX: Final = 64
_EVENT_ID: Final = re.compile(r"[!-~]{1,200}")

_WIRE: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field} has an unknown value", field=unknown.field),
    defaults={Overlap: Overlap.ALLOW, Authentication: Authentication.SIGNATURE},
)
_DEFINITION: Final = _WIRE.struct(TriggerDefinition, trigger_pb2.TriggerDefinition, field="definition")

_POSITION: Final = _WIRE.struct(MailPosition, trigger_pb2.MailPosition)


class TriggerServicer:
    """Implements the trigger methods. agent-loop validates the runs' settings, then calls them on behalf of a user."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers

    async def CreateTrigger(self, request: pb.CreateTriggerRequest, context: Context) -> pb.CreateTriggerResponse:
        row, secret = await self._triggers.put(
            owner_of_user(), _definition(request.definition), must_exist=False, validate_only=request.validate_only
        )
        return pb.CreateTriggerResponse(trigger=_message(row), secret=secret)

    async def UpdateTrigger(self, request: pb.UpdateTriggerRequest, context: Context) -> pb.UpdateTriggerResponse:
        row, _ = await self._triggers.put(
            owner_of_user(), _definition(request.definition), must_exist=True, validate_only=request.validate_only
        )
        return pb.UpdateTriggerResponse(trigger=_message(row))

    async def GetTrigger(self, request: pb.GetTriggerRequest, context: Context) -> pb.GetTriggerResponse:
        user = require_user()
        row, states, _ = await self._triggers.get(user.store_id, user.user_id, check_id(request.name, "name"))
        return pb.GetTriggerResponse(trigger=_message(row, states))

    async def ListTriggers(self, request: pb.ListTriggersRequest, context: Context) -> pb.ListTriggersResponse:
        user = require_user()
        return pb.ListTriggersResponse(triggers=map(_message, await self._triggers.list(user.store_id, user.user_id)))

    async def PauseTrigger(self, request: pb.PauseTriggerRequest, context: Context) -> pb.PauseTriggerResponse:
        name, note = check_id(request.name, "name"), check_note(request.note)
        row = await self._triggers.pause(owner_of_user(), name, note, paused=True)
        return pb.PauseTriggerResponse(trigger=_message(row))

    async def ResumeTrigger(self, request: pb.ResumeTriggerRequest, context: Context) -> pb.ResumeTriggerResponse:
        row = await self._triggers.pause(owner_of_user(), check_id(request.name, "name"), "", paused=False)
        return pb.ResumeTriggerResponse(trigger=_message(row))

    async def DeleteTrigger(self, request: pb.DeleteTriggerRequest, context: Context) -> pb.DeleteTriggerResponse:
        user = require_user()
        await self._triggers.delete(user.store_id, user.user_id, check_id(request.name, "name"))
        return pb.DeleteTriggerResponse()

    async def RotateTriggerSecret(
        self, request: pb.RotateTriggerSecretRequest, context: Context
    ) -> pb.RotateTriggerSecretResponse:
        user = require_user()
        secret = await self._triggers.rotate(user.store_id, user.user_id, check_id(request.name, "name"))
        return pb.RotateTriggerSecretResponse(secret=secret)


class TriggerLedgerServicer(triggers_pb2_grpc.TriggerLedgerServiceServicer):
    def __init__(self, triggers: Triggers, limits_of: LimitsOf) -> None:
        self._triggers = triggers
        self._limits_of = limits_of

    async def CheckWebhook(self, request: ledger.CheckWebhookRequest, context: Context) -> ledger.CheckWebhookResponse:
        store_id, trigger_id = check_id(request.store_id, "store_id"), check_id(request.trigger_id, "trigger_id")
        row, event_id = await self._triggers.check(store_id, trigger_id, request.headers, request.body)
        return ledger.CheckWebhookResponse(due=_due(row), event_id=event_id)

    async def ClaimEvents(self, request: ledger.ClaimEventsRequest, context: Context) -> ledger.ClaimEventsResponse:
        if not 1 <= request.events_max <= CLAIMED_MAX:
            raise InvalidField(
                f"events_max must be between 1 and {CLAIMED_MAX}, got {request.events_max}", field="events_max"
            )
        claimed, wait_seconds = await self._triggers.claim(request.events_max)
        events = [
            ledger.ClaimedEvent(
                due=_due(trigger),
                event=ledger.TriggerEvent(
                    event_id=lane.event_id,
                    lane=lane.lane,
                    data=lane.data,
                    conversation_key=lane.conversation_key,
                ),
            )
            for trigger, lane in claimed
        ]
        return ledger.ClaimEventsResponse(events=events, wait_seconds=wait_seconds)

    async def LeaseMailboxes(
        self, request: ledger.LeaseMailboxesRequest, context: Context
    ) -> ledger.LeaseMailboxesResponse:
        leased = await self._triggers.lease_mailboxes(check_id(request.reader_id, "reader_id"))
        return ledger.LeaseMailboxesResponse(mailboxes=map(_leased, leased))

    async def CheckMailbox(self, request: ledger.CheckMailboxRequest, context: Context) -> ledger.CheckMailboxResponse:
        row = await self._triggers.leased(_key(request.store_id, request.trigger_id), request.generation)
        return ledger.CheckMailboxResponse(due=None if row is None else _due(row))

    async def ReportMailbox(
        self, request: ledger.ReportMailboxRequest, context: Context
    ) -> ledger.ReportMailboxResponse:
        position = _POSITION.read(request.position) if request.HasField("position") else None
        key = _key(request.store_id, request.trigger_id)
        await self._triggers.report_mailbox(key, request.generation, position, request.reason)
        return ledger.ReportMailboxResponse()

    async def FireTrigger(self, request: ledger.FireTriggerRequest, context: Context) -> ledger.FireTriggerResponse:
        due, event = request.due, request.event
        if not _EVENT_ID.fullmatch(event.event_id):
            raise InvalidField("event_id must be 1 to 200 visible ASCII characters", field="event.event_id")
        if len(event.lane) > _LANE_CHARACTERS_MAX:
            raise InvalidField(
                f"lane must be at most {_LANE_CHARACTERS_MAX} characters, got {len(event.lane)}", field="event.lane"
            )
        if len(event.data) > DATA_BYTES_MAX:
            raise TooLarge(f"data must be at most {DATA_BYTES_MAX} bytes, got {len(event.data)}", field="event.data")
        fired = await self._triggers.fire(
            Deliver(
                trigger=_key(due.owner.store_id, due.trigger_id),
                generation=due.generation,
                event_id=event.event_id,
                lane=event.lane if event.HasField("lane") else None,
                data=event.data,
                conversation_key=event.conversation_key,
                submit=operations.submit(request.message, self._limits_of) if request.HasField("message") else None,
                refusal=request.refusal,
                claimed=request.claimed,
                mail=_POSITION.read(request.mail) if request.HasField("mail") else None,
                skipped=request.skipped,
            ),
            request.ByteSize(),
        )
        fire = None if fired.fire is None else FIRE.write(fired.fire)
        return ledger.FireTriggerResponse(fire=fire, duplicate=fired.duplicate)


def _key(store_id: str, trigger_id: str) -> TriggerKey:
    return TriggerKey(check_id(store_id, "store_id"), check_id(trigger_id, "trigger_id"))


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


def _due(row: TriggerRow) -> ledger.DueTrigger:
    return ledger.DueTrigger(
        owner=OWNER.write(owner_of(row)),
        definition=_DEFINITION.write(row.definition),
        trigger_id=row.trigger_id,
        generation=row.generation,
    )


def _leased(row: TriggerRow) -> trigger_pb2.LeasedMailbox:
    return trigger_pb2.LeasedMailbox(
        store_id=row.store_id,
        user_id=row.user_id,
        trigger_id=row.trigger_id,
        name=row.name,
        generation=row.generation,
        mailbox=_DEFINITION.write(row.definition).mailbox,
        position=trigger_pb2.MailPosition(uid_validity=row.uid_validity, uid=row.last_uid),
    )
