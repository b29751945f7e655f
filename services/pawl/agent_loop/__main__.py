"""The agent loop: `python -m pawl.agent_loop`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import grpc

from pawl.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from pawl.agent_loop.adapters import step_log
from pawl.agent_loop.adapters.call_checker import RegistryCallChecker
from pawl.agent_loop.adapters.live import BusEvents
from pawl.agent_loop.adapters.meter import PrometheusMeter
from pawl.agent_loop.adapters.model.client import OpenAiModel
from pawl.agent_loop.adapters.public_ledger import LedgerClient
from pawl.agent_loop.adapters.registry import RegistryClient
from pawl.agent_loop.adapters.wakeups import BusWakeups
from pawl.agent_loop.adapters.worker_ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.app.drive import Drive
from pawl.agent_loop.app.inbox import Inbox
from pawl.agent_loop.app.jobs import Workshop
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.operators import Operators
from pawl.agent_loop.app.pending import Pending
from pawl.agent_loop.app.run_steps import RunSteps
from pawl.agent_loop.app.session import Sessions
from pawl.agent_loop.app.undoing import Undoing
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.app.worker import Worker, WorkerLimits
from pawl.agent_loop.domain.history import Dialect
from pawl.agent_loop.rpc.operator_servicer import OperatorServicer
from pawl.agent_loop.rpc.servicer import AgentServicer
from pawl.agent_loop.settings import AgentLoopSettings
from pawl.chassis.lifecycle import Stop, run_service
from pawl.chassis.service import Service
from pawl.chassis.settings import load


async def main(stop: Stop) -> None:
    """Serve and drive runs until `stop`."""
    settings = load(AgentLoopSettings)
    async with Service("agent_loop", settings) as service:
        bus = await service.open_bus()
        job_store = await service.open_channel(
            "job_store", settings.job_store_address, message_bytes_max=LEDGER_MESSAGE_BYTES_MAX
        )
        # Without it there are still runs to read, to answer and to end.
        tool_registry = await service.open_channel("tool_registry", settings.tool_registry_address, optional=True)
        model = await service.enter(
            OpenAiModel(
                base_url=settings.openai_base_url,
                api_key=settings.openai_api_key.get_secret_value() if settings.openai_api_key else "",
                output_tokens_field=settings.output_tokens_field,
            )
        )

        worker = _worker(service, settings, model, job_store, tool_registry)
        await worker.listen(BusWakeups(bus))
        service.background.start("claims", worker.claim_forever)
        service.background.start("leases", worker.renew_forever)
        service.background.start("fence", worker.fence_forever)

        ledger = LedgerClient(job_store)
        watches = await service.enter(Watches(ledger=ledger, live=BusEvents(bus)))
        defaults = settings.run_defaults
        messages = Messages(ledger=ledger, defaults=defaults)
        inbox = Inbox(ledger=ledger, checker=RegistryCallChecker(tool_registry), ids=service.ids)
        sessions = Sessions(
            ledger=ledger, watches=watches, messages=messages, inbox=inbox, clock=service.clock, ids=service.ids
        )

        server = service.rpc_server()
        servicer = AgentServicer(
            ledger=ledger,
            messages=messages,
            inbox=inbox,
            pending=Pending(ledger=ledger, clock=service.clock),
            watches=watches,
            sessions=sessions,
            undoing=Undoing(ledger=ledger, defaults=defaults),
            steps=RunSteps(ledger=ledger, watches=watches, take_in=step_log.take_in),
        )
        server.add(add_AgentServiceServicer_to_server, servicer)
        operators = Operators(ledger=ledger, ids=service.ids)
        server.add(add_OperatorServiceServicer_to_server, OperatorServicer(operators))
        await _beside(service.serve(server, stop), stop, worker.hand_over)


def _worker(
    service: Service,
    settings: AgentLoopSettings,
    model: OpenAiModel,
    job_store: grpc.aio.Channel,
    tool_registry: grpc.aio.Channel,
) -> Worker:
    shop = Workshop(
        ledger=WorkerLedgerClient(job_store),
        registry=RegistryClient(tool_registry),
        model=model,
        clock=service.clock,
        ids=service.ids,
        random=random.random,
        meter=PrometheusMeter(service.metrics),
        default_model=settings.model,
        dialect=Dialect(reasoning_echo=settings.reasoning_echo),
    )
    return Worker(
        # A name of its own for each start: what an earlier process held is not this one's.
        service.ids.new("wrk"),
        ledger=shop.ledger,
        new_drive=lambda claim, failure: Drive(claim, shop, failure=failure),
        clock=shop.clock,
        ids=shop.ids,
        random=shop.random,
        meter=shop.meter,
        limits=WorkerLimits(
            runs_max=settings.runs_max,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.lease_renew_seconds,
            poll_seconds=settings.poll_seconds,
        ),
    )


async def _beside(serving: Awaitable[None], stop: Stop, hand_over: Callable[[], Awaitable[None]]) -> None:
    """Serve; as soon as the process shall end, hand the runs over while clients are being drained."""

    async def hand_over_in_time() -> None:
        await stop.wait()
        await hand_over()

    handing_over = asyncio.get_running_loop().create_task(hand_over_in_time(), name="hand_over")
    try:
        await serving
    finally:
        if not stop.is_set():
            handing_over.cancel()
        await asyncio.gather(handing_over, return_exceptions=True)


if __name__ == "__main__":
    run_service(main)
