"""The parts that serve clients, put together: ports in, servicers out."""

from __future__ import annotations

from dataclasses import dataclass, field

from pawl.agent.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from pawl.agent_loop.adapters import step_log
from pawl.agent_loop.app import watch
from pawl.agent_loop.app.inbox import Inbox
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.operators import Operators
from pawl.agent_loop.app.pending import Pending
from pawl.agent_loop.app.public_ports import CallChecker, LiveEvents, PublicLedger
from pawl.agent_loop.app.run_steps import RunSteps
from pawl.agent_loop.app.session import Sessions
from pawl.agent_loop.app.session_stream import Parts, SessionTimes
from pawl.agent_loop.app.undoing import Undoing
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc.operator_servicer import OperatorServicer
from pawl.agent_loop.rpc.servicer import HEARTBEAT_SECONDS, AgentServicer
from pawl.chassis.clock import Clock
from pawl.chassis.ids import IdSource
from pawl.chassis.rpc_server import RpcServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    """The patience and the rhythm of what serves clients."""

    sessions: SessionTimes = field(default_factory=SessionTimes)
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    poll_seconds: float = watch.POLL_SECONDS
    connected_poll_seconds: float = watch.CONNECTED_POLL_SECONDS


class ClientSide:
    """The parts that serve clients: enter `watches`, add the servicers to a server."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        live: LiveEvents,
        checker: CallChecker,
        clock: Clock,
        ids: IdSource,
        defaults: RunDefaults,
        times: ClientTimes = ClientTimes(),
    ) -> None:
        """Wire the parts over these ports."""
        self.watches = Watches(
            ledger=ledger,
            live=live,
            poll_seconds=times.poll_seconds,
            connected_poll_seconds=times.connected_poll_seconds,
        )
        self.messages = Messages(ledger=ledger, defaults=defaults)
        self.inbox = Inbox(ledger=ledger, checker=checker, ids=ids)
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
        self.servicer = AgentServicer(
            ledger=ledger,
            messages=self.messages,
            inbox=self.inbox,
            pending=Pending(ledger=ledger, clock=clock),
            watches=self.watches,
            sessions=self.sessions,
            undoing=Undoing(ledger=ledger, defaults=defaults),
            steps=RunSteps(ledger=ledger, watches=self.watches, take_in=step_log.take_in),
            heartbeat_seconds=times.heartbeat_seconds,
        )
        self.operators = Operators(ledger=ledger, ids=ids)
        self._operator_servicer = OperatorServicer(ledger, self.operators)

    def add_to(self, server: RpcServer) -> None:
        """Have a server answer for them."""
        server.add(add_AgentServiceServicer_to_server, self.servicer)
        server.add(add_OperatorServiceServicer_to_server, self._operator_servicer)
