"""The ledger's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

import grpc

from pawl.agent_loop.app.public_values import DueSchedule, ScheduledMessage
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CredentialId, RequestId, StoreId, UserId
from pawl.chassis.rows import read_each
from pawl.chassis.rpc_client import translated
from pawl.event.v1 import schedule_pb2
from pawl.job.v1 import schedules_pb2 as pb
from pawl.job.v1 import schedules_pb2_grpc
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest


class ScheduleLedgerClient:
    """A `ScheduleLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = schedules_pb2_grpc.ScheduleLedgerServiceStub(channel)

    async def put_schedule(self, caller: Principal, definition: object, *, must_exist: bool) -> object:
        asked = cast("schedule_pb2.ScheduleDefinition", definition)
        request = pb.PutScheduleRequest(owner=owner_message(caller), definition=asked, must_exist=must_exist)
        return (await translated(self._stub.PutSchedule(request))).schedule

    async def get_schedule(self, caller: Principal, name: str) -> tuple[object, DueSchedule]:
        request = pb.GetScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        response = await translated(self._stub.GetSchedule(request))
        return response.schedule, _due(response.due)

    async def past_times(self, caller: Principal, name: str, begin: datetime, end: datetime) -> Sequence[datetime]:
        request = pb.GetScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        request.begin_time.FromDatetime(begin)
        request.end_time.FromDatetime(end)
        response = await translated(self._stub.GetSchedule(request))
        return tuple(time.ToDatetime(tzinfo=UTC) for time in response.past_times)

    async def list_schedules(self, caller: Principal) -> Sequence[object]:
        request = pb.ListSchedulesRequest(store_id=caller.store_id, user_id=caller.user_id)
        return tuple((await translated(self._stub.ListSchedules(request))).schedules)

    async def pause_schedule(self, caller: Principal, name: str, note: str, *, paused: bool) -> object:
        request = pb.PauseScheduleRequest(owner=owner_message(caller), name=name, note=note, paused=paused)
        return (await translated(self._stub.PauseSchedule(request))).schedule

    async def delete_schedule(self, caller: Principal, name: str) -> None:
        request = pb.DeleteScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        await translated(self._stub.DeleteSchedule(request))

    async def claim_schedules(self, schedules_max: int) -> tuple[Sequence[DueSchedule], float]:
        response = await translated(self._stub.ClaimSchedules(pb.ClaimSchedulesRequest(schedules_max=schedules_max)))
        due = read_each("schedule", response.schedules, _due, lambda each: each.schedule_id)
        return due, response.wait_seconds

    async def fire_schedule(
        self,
        due: DueSchedule,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> object | None:
        request = pb.FireScheduleRequest(
            due=cast("pb.DueSchedule", due.document),
            message=message,
            refusal=refusal,
            request_id=request_id,
        )
        if backfill_time is not None:
            request.backfill_time.FromDatetime(backfill_time)
        response = await translated(self._stub.FireSchedule(request))
        return response.fire if response.HasField("fire") else None


def owner_message(caller: Principal) -> pb.ScheduleOwner:
    """Return whose a schedule, or a trigger, is."""
    return pb.ScheduleOwner(
        store_id=caller.store_id,
        user_id=caller.user_id,
        user_roles=sorted(caller.roles),
        credential_id=caller.credential_id,
        delegate_user_id=caller.delegate_user_id,
        people=sorted(caller.people),
    )


def caller_of(owner: pb.ScheduleOwner) -> Principal:
    """Return with whose rights runs are started."""
    return Principal(
        store_id=StoreId(owner.store_id),
        user_id=UserId(owner.user_id),
        roles=frozenset(owner.user_roles),
        credential_id=CredentialId(owner.credential_id),
        delegate_user_id=UserId(owner.delegate_user_id),
        people=frozenset(map(UserId, owner.people)),
    )


def _due(message: pb.DueSchedule) -> DueSchedule:
    definition = message.definition
    scheduled = ScheduledMessage(
        text=definition.text,
        agent=definition.agent,
        labels=dict(definition.labels),
        conversation_key=definition.conversation_key,
    )
    return DueSchedule(
        caller=caller_of(message.owner),
        message=scheduled,
        document=message,
        name=definition.name,
        time_zone=definition.time_zone,
        expected_time=message.expected_time.ToDatetime(tzinfo=UTC) if message.HasField("expected_time") else None,
    )
