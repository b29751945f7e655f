"""Events that the owner of a run supplies, and commands, from and to messages of the contract."""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.command import (
    AgentEnded,
    Cancel,
    Command,
    Completed,
    Decide,
    Pause,
    Progress,
    Resolve,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.agent_loop.loop.rules.event import OutputDelta, RoundEnded, RoundRetrying, RoundStarted, ToolProgress, Warned
from pawl.chassis.rpc.translate import Exceptions, kinds_of
from pawl.event.v1 import event_pb2
from pawl.job.v1 import ledger_pb2

EVENT: Final = wire.WIRE.one_of(
    event_pb2.RunEvent,
    "kind",
    {
        "round_started": RoundStarted,
        "round_retrying": RoundRetrying,
        "round_ended": RoundEnded,
        "output_delta": OutputDelta,
        "tool_progress": ToolProgress,
        "warning": Warned,
    },
    # The ledger writes these itself.
    without=(
        *("run_changed", "message_added", "call_changed", "operator_acted", "run_topped_up"),
        *("starter_paused", "starter_fired"),
    ),
)

wire.WIRE.struct(ToolResult, ledger_pb2.ToolResultCommand, Exceptions(of_message=("client_id", "offer_epoch")))
wire.WIRE.struct(Decide, ledger_pb2.DecisionCommand, Exceptions(of_message=("digest",)))
wire.WIRE.struct(
    Progress,
    ledger_pb2.ProgressCommand,
    Exceptions(of_message=("call_id", "fraction", "message", "client_id", "offer_epoch")),
)
KIND: Final = wire.WIRE.one_of(
    ledger_pb2.Command,
    "kind",
    {
        "tool_result": ToolResult,
        "decision": Decide,
        "steer": Steer,
        "cancel": Cancel,
        "resolve": Resolve,
        "progress": Progress,
        "top_up": TopUp,
        "pause": Pause,
        "completed": Completed,
        "agent_ended": AgentEnded,
    },
    without=("redrive",),  # The ledger's own.
)
COMMAND: Final = wire.WIRE.struct(
    Command, ledger_pb2.Command, Exceptions(read={"kind": KIND.read}, of_message=kinds_of(ledger_pb2.Command, "kind"))
)
