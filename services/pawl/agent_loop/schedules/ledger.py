"""The ledger's schedules, for those that fire them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import grpc

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, RequestId, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.event.v1 import schedule_pb2
from pawl.job.v1 import schedules_pb2 as pb
from pawl.job.v1 import schedules_pb2_grpc
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest


class ScheduleLedger:
    """Claims and fires schedules, over a channel to job-store. It makes no retries.

    Every method may raise DependencyUnavailable.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = schedules_pb2_grpc.ScheduleLedgerServiceStub(channel)

    async def due(
        self, caller: Principal, name: str, begin: datetime | None = None, end: datetime | None = None
    ) -> pb.GetDueScheduleResponse:
        """Read what is needed to fire a schedule of the caller now, and its due times from `begin` to `end`.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge
        """
        request = pb.GetDueScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        if begin is not None and end is not None:
            request.begin_time.FromDatetime(begin)
            request.end_time.FromDatetime(end)
        return await translated(self._stub.GetDueSchedule(request))

    async def claim(self, schedules_max: int) -> tuple[Sequence[pb.DueSchedule], float]:
        """Claim schedules that are due; return them, and the seconds after which to ask again."""
        response = await translated(self._stub.ClaimSchedules(pb.ClaimSchedulesRequest(schedules_max=schedules_max)))
        return response.schedules, response.wait_seconds

    async def fire(
        self,
        due: pb.DueSchedule,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> schedule_pb2.ScheduleFire | None:
        """Fire a schedule, with the message of its run or why there is none; None if it has changed since.

        A fire with a `backfill_time` stands for that due time of the past.

        Raises:
            ScheduleNotFound, RequestIdReused
        """
        request = pb.FireScheduleRequest(
            due=due,
            message=message,
            refusal=refusal,
            request_id=request_id,
        )
        if backfill_time is not None:
            request.backfill_time.FromDatetime(backfill_time)
        response = await translated(self._stub.FireSchedule(request))
        return response.fire if response.HasField("fire") else None


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
