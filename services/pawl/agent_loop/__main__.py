"""Starts the agent-loop service with `python -m pawl.agent_loop`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import grpc

from pawl.agent.v1.schedule_pb2_grpc import add_ScheduleServiceServicer_to_server
from pawl.agent.v1.trigger_pb2_grpc import add_TriggerServiceServicer_to_server
from pawl.agent_loop.agents.agents import AgentLedger
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.rounds import Rebuilding
from pawl.agent_loop.loop.ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.loop.metrics import PrometheusMeter
from pawl.agent_loop.loop.model_call import request_of
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.agent_loop.loop.spans import Tracing, tracing_of
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.agent_loop.model.breaker import Breaker
from pawl.agent_loop.model.client import OpenAiModel, body_of
from pawl.agent_loop.model.request import ModelRequest
from pawl.agent_loop.model.servers import ModelServers
from pawl.agent_loop.model.shared import PerMinute, SharedModels
from pawl.agent_loop.schedules.rpc import ScheduleServicer
from pawl.agent_loop.schedules.starting import Starting
from pawl.agent_loop.settings import DEFAULT_SERVER, AgentLoopSettings
from pawl.agent_loop.titles.titles import TitleMaker
from pawl.agent_loop.triggers.rpc import TriggerServicer
from pawl.agent_loop.wiring import ClientSide
from pawl.agent_loop.workflows.reading import Graphs
from pawl.agent_loop.workflows.versions import WorkflowLedger
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import WorkerId
from pawl.job.v1.models_pb2_grpc import ModelServiceStub
from pawl.job.v1.schedules_pb2_grpc import ScheduleLedgerServiceStub
from pawl.job.v1.titles_pb2_grpc import TitleServiceStub
from pawl.job.v1.triggers_pb2_grpc import TriggerLedgerServiceStub
from pawl.server.bus.connection import Bus
from pawl.server.identity.credentials import gone
from pawl.server.identity.key_sync import KeySyncClient
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load


async def main(stop: asyncio.Event) -> None:
    settings = load(AgentLoopSettings)
    async with Service("agent_loop", settings) as service:
        bus = await service.open_bus()
        job_store = await service.open_channel(
            "job_store", settings.job_store_address, message_bytes_max=LEDGER_MESSAGE_BYTES_MAX
        )
        # Optional: clients can read, answer and end runs even without tool-registry.
        registry = RegistryClient(
            await service.open_channel("tool_registry", settings.tool_registry_address, optional=True)
        )
        tracer = await service.open_tracer()
        is_gone = gone(settings, service.clock, lambda: service.key_rows)
        worker = None
        if settings.drives_runs:
            tracing = tracing_of(tracer, {name: url for name, (url, _) in settings.model_servers.items()})
            worker = await _worker(
                service, settings, bus, job_store, registry, tracing=tracing, credential_is_gone=is_gone
            )
        server = service.rpc_server(KeySyncClient(job_store))
        if settings.serves_clients:
            live = BusEvents(bus)
            clients = ClientSide(
                ledger=PublicLedger(job_store, worker.wake, worker.background_steps)
                if worker
                else PublicLedger(job_store),
                agents=AgentLedger(job_store),
                live=live,
                registry=registry,
                clock=service.clock,
                ids=service.ids,
                defaults=settings.run_defaults,
                takes_images=settings.takes_images,
                rebuilding=Rebuilding(
                    partial(
                        request_of,
                        default_model=settings.model,
                        echo=settings.reasoning_echo,
                        takes_images=settings.takes_images,
                        background_as_tool=settings.limits.background == "tool",
                    ),
                    _body_of(settings),
                ),
            )
            await service.enter(clients.watches)
            clients.watches.measure(service.metrics)
            service.background.start("pending", partial(clients.pending.follow, live))
            service.background.start("conversations", partial(clients.conversations.follow, live))
            clients.add_to(server)
            starting = Starting(clients.messages, clients.workflow_starting, is_gone, traces=tracer is not None)
            stub = ScheduleLedgerServiceStub(job_store)
            schedules = ScheduleServicer(stub, starting, service.clock, clients.forward)
            server.add_forwarding(add_ScheduleServiceServicer_to_server, schedules, clients.forward)
            service.background.start("schedules", schedules.fire_forever)
            events = TriggerLedgerServiceStub(job_store)
            triggers = TriggerServicer(events, starting, service.clock, service.ids, clients.forward)
            server.add_forwarding(add_TriggerServiceServicer_to_server, triggers, clients.forward)
            service.background.start("triggers", triggers.fire_forever)
        serving = service.serve(server, stop)
        await (_beside(serving, stop, worker.hand_over) if worker else serving)


async def _worker(
    service: Service,
    settings: AgentLoopSettings,
    bus: Bus,
    job_store: grpc.aio.Channel,
    registry: RegistryClient,
    *,
    tracing: Tracing | None,
    credential_is_gone: Callable[[Principal], bool],
) -> Worker:
    shared = SharedModels(
        ModelServiceStub(job_store),
        {
            "" if name == DEFAULT_SERVER else name: PerMinute(each.requests_per_minute, each.tokens_per_minute)
            for name, each in settings.limits.model_servers.items()
        },
    )
    model = await _models(service, settings, shared)
    dependencies = WorkerDependencies(
        ledger=WorkerLedgerClient(job_store, service.clock.monotonic),
        agents=AgentLedger(job_store),
        graphs=Graphs(WorkflowLedger(job_store)),
        registry=registry,
        model=model,
        shared=shared,
        clock=service.clock,
        ids=service.ids,
        random=random.random,
        meter=PrometheusMeter(service.metrics, settings.provider, service.clock.monotonic),
        default_model=settings.model,
        reasoning_echo=settings.reasoning_echo,
        background_as_tool=settings.limits.background == "tool",
        takes_images=settings.takes_images,
        makes_titles=settings.titles == "model",
        tracing=tracing,
        approvals_required=settings.limits.approvals_required,
        credential_is_gone=credential_is_gone,
    )
    limits = WorkerLimits(
        runs_max=settings.runs_max,
        lease_seconds=settings.lease_seconds,
        renew_seconds=settings.lease_renew_seconds,
    )
    if not settings.serves_clients:
        # In this role, the processes that serve clients do not claim the runs that their requests make due, so this
        # process claims them without delay.
        limits = replace(limits, remote_work_delay_seconds=0.0)
    # Use a new id for each start, so that this process does not take over an earlier process's leases.
    worker = Worker(WorkerId(service.ids.new("wrk")), dependencies, limits)
    await worker.listen(bus)
    service.background.start("ended model calls", shared.count_ended)
    service.background.start("model servers", partial(shared.announce, service.clock))
    service.background.start("claims", worker.claim_forever)
    service.background.start("leases", worker.renew_forever)
    service.background.start("fence", worker.fence_forever)
    if dependencies.makes_titles:
        maker = TitleMaker(
            TitleServiceStub(job_store),
            model,
            shared,
            clock=service.clock,
            meter=dependencies.meter,
            default_model=settings.model,
        )
        service.background.start("titles", maker.run)
    return worker


def _body_of(settings: AgentLoopSettings) -> Callable[[ModelRequest], bytes]:
    return partial(
        body_of, output_tokens_field=settings.output_tokens_field, format_with_tools=settings.format_with_tools
    )


async def _models(service: Service, settings: AgentLoopSettings, shared: SharedModels) -> ModelServers:
    found = {}
    for name, (base_url, api_key) in settings.model_servers.items():
        client = OpenAiModel(
            base_url=base_url,
            api_key=api_key,
            body=_body_of(settings),
        )
        found[name] = Breaker(await service.enter(client), service.clock.monotonic, partial(shared.report, name))
    return ModelServers(found)


async def _beside(serving: Awaitable[None], stop: asyncio.Event, hand_over: Callable[[], Awaitable[None]]) -> None:
    """Serve until shutdown. Then hand over the runs while open requests finish."""

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
