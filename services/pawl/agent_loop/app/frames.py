"""The frames of a Session. Meanings are those of pawl.agent.v1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import msgspec

from pawl.agent_loop.app.public_values import CallView, LogGap, LoggedEvent, Reply
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.parts import Part
from pawl.chassis.ids import CallId, ClientId, ConversationId, RunId
from pawl.values.call import DecisionKind, Series
from pawl.values.command import CommandOutcome
from pawl.values.run import MessagePolicy, RunState


class ClientTool(msgspec.Struct, frozen=True, kw_only=True):
    """A front-end tool that a client can run; no versions means any."""

    name: str
    versions: frozenset[int] = frozenset()


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The client and the tools that it can run."""

    client_id: ClientId
    tools: tuple[ClientTool, ...]
    calls_max: int
    front_end_tools: tuple[bytes, ...] = ()
    """The definitions, as the contract has them, of tools that come with each run which it starts."""


class UserMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to a conversation; where it starts a run, to a new one if none is named."""

    conversation_id: ConversationId
    text: str
    options: AskedOptions
    policy: MessagePolicy
    conversation_key: str = ""
    agent: str = ""
    """The agent that drives the run which it starts; empty for `default`."""
    parts: tuple[Part, ...] = ()
    """The rest of the message, after its text."""
    front_end_tools: tuple[bytes, ...] = ()
    """The definitions, as the contract has them, of tools that come with the run."""
    labels: Mapping[str, str] = {}
    """Those of the run which it starts."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start a run and attach to it."""

    message: UserMessage


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """Get the events of a run, and take its offers."""

    run_id: RunId
    after_seq: int


class Detach(msgspec.Struct, frozen=True, kw_only=True):
    """Stop getting the events of a run."""

    run_id: RunId


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a front-end call; `offer_epoch` 0 outside a Session."""

    run_id: RunId
    call_id: CallId
    content_json: bytes
    is_error: bool
    offer_epoch: int


class ToolProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an offered call."""

    run_id: RunId
    call_id: CallId
    offer_epoch: int
    fraction: float | None
    message: str


class CallDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or an answer."""

    run_id: RunId
    call_id: CallId
    kind: DecisionKind
    digest: str = ""
    arguments_json: bytes = b""
    reason: str = ""
    answer: str = ""
    for_series: bool = False
    edited_series: Series | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """Stop a run."""

    run_id: RunId
    reason: str


class ClientHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A life sign."""


Content: TypeAlias = (
    Hello | Start | Attach | Detach | ToolResult | ToolProgress | CallDecision | UserMessage | Cancel | ClientHeartbeat
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFrame:
    """A frame from the client. `content` is an error where the frame itself is wrong."""

    frame_id: str
    content: Content | Exception = field(repr=False)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answers the hello."""

    client_id: ClientId
    offer_lease_seconds: float
    silence_max_seconds: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of an attached run."""

    run_id: RunId
    event: LoggedEvent


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The place of events of an attached run that are not kept any more."""

    run_id: RunId
    gap: LogGap


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the client now holds."""

    call: CallView


class OfferRevoked(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the client must no longer run."""

    run_id: RunId
    call_id: CallId
    message: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of a frame or a result."""

    frame_id: str
    status: CommandOutcome
    reason: str = ""
    message: str = ""
    run_id: RunId = RunId("")
    call_id: CallId = CallId("")

    @classmethod
    def of(cls, reply: Reply, *, frame_id: str = "", run_id: RunId, call_id: CallId) -> Self:
        """Return what a reply is to the client: once a command is taken, it need not know why it was so before."""
        reason, message = ("", "") if reply.taken else (reply.reason, reply.message)
        return cls(
            frame_id=frame_id, status=reply.outcome, reason=reason, message=message, run_id=run_id, call_id=call_id
        )


class End(msgspec.Struct, frozen=True, kw_only=True):
    """All events of a run were sent and it has ended."""

    run_id: RunId
    last_seq: int
    state: RunState


class ServerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A life sign."""


ServerFrame: TypeAlias = Welcome | Event | Gap | Offer | OfferRevoked | Receipt | End | ServerHeartbeat
