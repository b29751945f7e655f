"""Servicer for pawl.job.v1.ModelService."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import StoreId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1 import models_pb2_grpc
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.models.store import Exceeded, PostgresModels, Rate

_NO_STORE: Final = StoreId("")
_CLOSED_SECONDS: Final = 10.0


class ModelServicer(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, models: PostgresModels, limits_of: LimitsOf) -> None:
        self._models = models
        self._limits_of = limits_of

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
        try:
            used = [rate for rate in rates if rate.per_minute and rate.used]
            await self._models.take(used, ended=request.ended)
        except Exceeded as exceeded:
            of_server = exceeded.rate.store_id == _NO_STORE
            return pb.TakeModelCallResponse(wait_seconds=exceeded.wait_seconds, of_server=of_server)
        return pb.TakeModelCallResponse()

    async def ReportModelServer(
        self, request: pb.ReportModelServerRequest, context: Context
    ) -> pb.ReportModelServerResponse:
        server = check_id(request.model_server, "model_server", optional=True)
        if request.answered:
            await self._models.end_outage(server)
            return pb.ReportModelServerResponse(may_attempt=True)
        if request.outages:
            await self._models.add_outages(server, min(request.outages, 1000), _CLOSED_SECONDS)
        may_attempt = request.attempts and await self._models.attempt(server, _CLOSED_SECONDS)
        outages, closed_seconds = await self._models.outage(server)
        return pb.ReportModelServerResponse(outages=outages, closed_seconds=closed_seconds, may_attempt=may_attempt)
