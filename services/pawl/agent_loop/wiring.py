from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from pawl.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from pawl.agent.v1.agents_pb2_grpc import add_AgentRegistryServiceServicer_to_server
from pawl.agent.v1.conversation_pb2_grpc import add_ConversationServiceServicer_to_server
from pawl.agent.v1.declaration_pb2_grpc import add_DeclarationServiceServicer_to_server
from pawl.agent.v1.goal_pb2_grpc import add_GoalServiceServicer_to_server
from pawl.agent.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from pawl.agent.v1.usage_pb2_grpc import add_UsageServiceServicer_to_server
from pawl.agent.v1.workflow_pb2_grpc import add_WorkflowServiceServicer_to_server
from pawl.agent_loop.agents.agents import AgentLedger, Agents
from pawl.agent_loop.agents.rpc import AgentRegistryServicer
from pawl.agent_loop.api import watch
from pawl.agent_loop.api.inbox import Inbox
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.api.operator_rpc import OperatorServicer
from pawl.agent_loop.api.pending import Pending
from pawl.agent_loop.api.rounds import Rebuilding, Rounds
from pawl.agent_loop.api.rpc import HEARTBEAT_SECONDS, AgentServicer
from pawl.agent_loop.api.session import Sessions
from pawl.agent_loop.api.session_stream import Parts, SessionTimes
from pawl.agent_loop.api.watch import RunSteps, Watches
from pawl.agent_loop.api.whoami import Introductions
from pawl.agent_loop.conversations.rpc import ConversationServicer
from pawl.agent_loop.conversations.watch import ConversationWatches
from pawl.agent_loop.goals.rpc import GoalServicer
from pawl.agent_loop.goals.starting import GoalStarting
from pawl.agent_loop.jobs.convert import job
from pawl.agent_loop.jobs.rpc import JobServicer
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.agent_loop.undo.undoing import Undoing
from pawl.agent_loop.workflows.rpc import WorkflowServicer
from pawl.agent_loop.workflows.starting import WorkflowStarting
from pawl.agent_loop.workflows.versions import WorkflowLedger, Workflows
from pawl.chassis.identity.auth import current_principal
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import Clock
from pawl.server.rpc.server import RpcServer

_VERSION: Final = version("pawl-runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    sessions: SessionTimes = field(default_factory=SessionTimes)
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    poll_seconds: float = watch.POLL_SECONDS
    connected_poll_seconds: float = watch.CONNECTED_POLL_SECONDS


class ClientSide:
    """The servicers of the client API. Enter `watches` before adding the servicers to a server."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        agents: AgentLedger,
        live: BusEvents,
        registry: RegistryClient,
        clock: Clock,
        ids: IdSource,
        defaults: RunDefaults,
        rebuilding: Rebuilding,
        takes_images: bool = False,
        times: ClientTimes = ClientTimes(),
    ) -> None:
        self._ledger = ledger
        self.watches = Watches(
            ledger=ledger,
            live=live,
            poll_seconds=times.poll_seconds,
            connected_poll_seconds=times.connected_poll_seconds,
        )
        self.agents = Agents(ledger=agents, registry=registry, clock=clock, defaults=defaults)
        self.messages = Messages(
            ledger=ledger, defaults=defaults, agents=self.agents, registry=registry, takes_images=takes_images
        )
        self.inbox = Inbox(
            ledger=ledger, registry=registry, ids=ids, now=clock.now, lease_seconds=times.sessions.offer_lease_seconds
        )
        self.sessions = Sessions(
            ids,
            Parts(
                ledger=ledger,
                watches=self.watches,
                messages=self.messages,
                inbox=self.inbox,
                clock=clock,
                times=times.sessions,
            ),
        )
        self.pending = Pending(ledger=ledger, clock=clock)
        self._jobs = JobServicer(
            ledger=ledger, inbox=self.inbox, messages=self.messages, registry=registry, clock=clock, ids=ids
        )
        self.goal_starting = GoalStarting(ledger, self.messages, self.agents, registry, clock=clock, ids=ids)
        self._goals = GoalServicer(ledger, self.goal_starting, ids)
        self.servicer = AgentServicer(
            messages=self.messages,
            inbox=self.inbox,
            jobs=self._jobs,
            pending=self.pending,
            watches=self.watches,
            sessions=self.sessions,
            undoing=Undoing(ledger=ledger, defaults=defaults),
            steps=RunSteps(ledger=ledger, watches=self.watches),
            rounds=Rounds(ledger, registry, rebuilding),
            introductions=Introductions(
                registry=registry, agents=self.agents, defaults=defaults, takes_images=takes_images, version=_VERSION
            ),
            heartbeat_seconds=times.heartbeat_seconds,
        )
        self.operators = OperatorServicer(ledger, ids)
        self.conversations = ConversationWatches(
            ledger=ledger, watches=self.watches, clock=clock, job=job, heartbeat_seconds=2 * times.heartbeat_seconds
        )
        self._conversation_servicer = ConversationServicer(ledger, ids, self.conversations)
        workflows = Workflows(ledger=WorkflowLedger(ledger.channel), agents=self.agents, registry=registry)
        self.workflow_starting = WorkflowStarting(ledger, workflows, registry, defaults)
        self._workflows = WorkflowServicer(ledger, self.inbox, workflows, self.workflow_starting)

    async def forward(self, method: str, request: bytes) -> bytes:
        return await self._ledger.forward(current_principal(), method, request)

    def add_to(self, server: RpcServer) -> None:
        server.add_forwarding(add_AgentServiceServicer_to_server, self.servicer, self.forward)
        server.add_forwarding(add_OperatorServiceServicer_to_server, self.operators, self.forward)
        server.add(add_JobServiceServicer_to_server, self._jobs)
        server.add(add_GoalServiceServicer_to_server, self._goals)
        server.add_forwarding(add_DeclarationServiceServicer_to_server, None, self.forward)
        server.add_forwarding(add_ConversationServiceServicer_to_server, self._conversation_servicer, self.forward)
        server.add_forwarding(add_WorkflowServiceServicer_to_server, self._workflows, self.forward)
        registry = AgentRegistryServicer(self.agents)
        server.add_forwarding(add_AgentRegistryServiceServicer_to_server, registry, self.forward)
        server.add_forwarding(add_UsageServiceServicer_to_server, None, self.forward)
