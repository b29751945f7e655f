"""Servicer for pawl.job.v1.ModelService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from pawl.chassis.ids import StoreId, UserId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1 import models_pb2_grpc
from pawl.job.v1.agents_pb2 import TokenBudget
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc.budgets import Budgets
from pawl.job_store.models.store import Exceeded, OpenCall, PostgresModels, Rate, UsedUp, part_of
from pawl.server.db.database import Connection
from pawl.values import TOKENS_MAX

_NO_STORE: Final = StoreId("")
_CLOSED_SECONDS: Final = 10.0
_CALL_SECONDS_MAX: Final = 4000.0


class ModelServicer(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, models: PostgresModels, limits_of: LimitsOf, budgets: Budgets, meter: PrometheusMeter) -> None:
        self._models = models
        self._meter = meter
        self._limits_of = limits_of
        self._budgets = budgets

    async def TakeModelCall(self, request: pb.TakeModelCallRequest, context: Context) -> pb.TakeModelCallResponse:
        store_id = StoreId(check_id(request.store_id, "store_id"))
        server = check_id(request.model_server, "model_server", optional=True)
        own = self._limits_of(store_id)
        requests = 0 if request.ended else 1
        rates = [
            Rate(store_id, "requests", own.model_requests_per_minute, requests),
            Rate(store_id, "tokens", own.model_tokens_per_minute, request.tokens),
            Rate(_NO_STORE, f"requests of {server}", request.requests_per_minute, requests),
            Rate(_NO_STORE, f"tokens of {server}", request.tokens_per_minute, request.tokens),
        ]
        call = OpenCall(
            store_id=store_id,
            model_call_id=check_id(request.model_call_id, "model_call_id"),
            user_id=UserId(check_id(request.user_id, "user_id", optional=True)),
            agent_name=check_id(request.agent_name, "agent_name", optional=True),
            tokens=max(0, request.tokens) + min(request.output_tokens, TOKENS_MAX),
            seconds_max=min(max(request.seconds_max, 0.0), _CALL_SECONDS_MAX),
        )
        used = [rate for rate in rates if rate.per_minute and rate.used]
        try:
            for limit, part in (await self._take(call, used, ended=request.ended)).items():
                self._meter.limit_used(store_id, limit, part)
        except Exceeded as exceeded:
            self._meter.limit_used(store_id, exceeded.rate.limit, 1 + exceeded.wait_seconds / 60)
            of_server = exceeded.rate.store_id == _NO_STORE
            return pb.TakeModelCallResponse(wait_seconds=exceeded.wait_seconds, of_server=of_server)
        except UsedUp as used_up:
            self._meter.limit_used(store_id, *part_of(used_up.budget))
            return pb.TakeModelCallResponse(budget=used_up.budget)
        return pb.TakeModelCallResponse()

    async def _take(self, call: OpenCall, rates: Sequence[Rate], *, ended: bool) -> Mapping[str, float]:
        if ended or not call.user_id:
            return await self._models.take(call, rates, ended=ended)
        try:
            return await self._models.take(call, rates, await self._reading(call))
        except UsedUp:
            # Another replica may have raised the limit.
            await self._budgets.refresh()
        return await self._models.take(call, rates, await self._reading(call))

    async def _reading(self, call: OpenCall) -> Callable[[Connection], Awaitable[Sequence[TokenBudget]]]:
        named = call.store_id, call.user_id, call.agent_name
        limits = await self._budgets.limits(call.store_id, call.agent_name)
        return lambda connection: self._budgets.used(limits, *named, connection)

    async def ReportModelServer(
        self, request: pb.ReportModelServerRequest, context: Context
    ) -> pb.ReportModelServerResponse:
        server = check_id(request.model_server, "model_server", optional=True)
        if request.known_servers:
            await self._models.report_servers([check_id(name, "known_servers") for name in request.known_servers])
        if request.answered:
            await self._models.end_outage(server)
            return pb.ReportModelServerResponse(may_attempt=True)
        if request.outages:
            await self._models.add_outages(server, min(request.outages, 1000), _CLOSED_SECONDS)
        may_attempt = request.attempts and await self._models.attempt(server, _CLOSED_SECONDS)
        outages, closed_seconds = await self._models.outage(server)
        return pb.ReportModelServerResponse(outages=outages, closed_seconds=closed_seconds, may_attempt=may_attempt)
