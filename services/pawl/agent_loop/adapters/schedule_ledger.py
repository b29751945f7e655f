"""The ledger's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import grpc

from pawl.agent_loop.adapters.public_ledger import submission
from pawl.agent_loop.app.public_values import NewMessage
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CredentialId, RequestId, StoreId, UserId
from pawl.chassis.rpc_client import translated
from pawl.event.v1.schedule_pb2 import Schedule, ScheduleDefinition
from pawl.job.v1 import schedules_pb2 as pb
from pawl.job.v1 import schedules_pb2_grpc


class ScheduleLedgerClient:
    """pawl.job.v1.ScheduleLedgerService over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = schedules_pb2_grpc.ScheduleLedgerServiceStub(channel)

    async def put(self, caller: Principal, definition: ScheduleDefinition, *, must_exist: bool) -> Schedule:
        request = pb.PutScheduleRequest(owner=owner_message(caller), definition=definition, must_exist=must_exist)
        return (await translated(self._stub.PutSchedule(request))).schedule

    async def get(self, caller: Principal, name: str) -> pb.GetScheduleResponse:
        request = pb.GetScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        return await translated(self._stub.GetSchedule(request))

    async def past_times(self, caller: Principal, name: str, begin: datetime, end: datetime) -> Sequence[datetime]:
        request = pb.GetScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        request.begin_time.FromDatetime(begin)
        request.end_time.FromDatetime(end)
        response = await translated(self._stub.GetSchedule(request))
        return tuple(time.ToDatetime(tzinfo=UTC) for time in response.past_times)

    async def list(self, caller: Principal) -> Sequence[Schedule]:
        request = pb.ListSchedulesRequest(store_id=caller.store_id, user_id=caller.user_id)
        return (await translated(self._stub.ListSchedules(request))).schedules

    async def pause(self, caller: Principal, name: str, note: str = "", *, paused: bool) -> Schedule:
        request = pb.PauseScheduleRequest(owner=owner_message(caller), name=name, note=note, paused=paused)
        return (await translated(self._stub.PauseSchedule(request))).schedule

    async def delete(self, caller: Principal, name: str) -> None:
        request = pb.DeleteScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        await translated(self._stub.DeleteSchedule(request))

    async def claim(self, schedules_max: int) -> pb.ClaimSchedulesResponse:
        return await translated(self._stub.ClaimSchedules(pb.ClaimSchedulesRequest(schedules_max=schedules_max)))

    async def fire(
        self,
        due: pb.DueSchedule,
        message: NewMessage | None,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> pb.FireScheduleResponse:
        request = pb.FireScheduleRequest(
            due=due,
            message=None if message is None else submission(caller_of(due.owner), message),
            refusal=refusal,
            request_id=request_id,
        )
        if backfill_time is not None:
            request.backfill_time.FromDatetime(backfill_time)
        return await translated(self._stub.FireSchedule(request))


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
