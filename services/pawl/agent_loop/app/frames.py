"""The frames of a Session. Meanings are those of pawl.agent.v1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self, TypeAlias

from pawl.agent_loop.app.public_values import CallView, LogGap, LoggedEvent, MessagePolicy, Outcome, Reply
from pawl.agent_loop.domain.call import DecisionKind
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import RunState
from pawl.chassis.ids import CallId, ClientId, ConversationId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A front-end tool that a client can run; no versions means any."""

    name: str
    versions: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The client and the tools that it can run."""

    client_id: ClientId
    tools: tuple[ClientTool, ...]
    calls_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage:
    """A message to a conversation; where it starts a run, to a new one if none is named."""

    conversation_id: ConversationId
    text: str
    options: AskedOptions
    policy: MessagePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a run and attach to it."""

    message: UserMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Get the events of a run, and take its offers."""

    run_id: RunId
    after_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Stop getting the events of a run."""

    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a front-end call; `offer_epoch` 0 outside a Session."""

    run_id: RunId
    call_id: CallId
    content_json: bytes
    is_error: bool
    offer_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolProgress:
    """Progress of an offered call."""

    run_id: RunId
    call_id: CallId
    offer_epoch: int
    fraction: float | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDecision:
    """A decision or an answer."""

    run_id: RunId
    call_id: CallId
    kind: DecisionKind
    digest: str = ""
    arguments_json: bytes = b""
    reason: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop a run."""

    run_id: RunId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHeartbeat:
    """A life sign."""


Content: TypeAlias = (
    Hello | Start | Attach | Detach | ToolResult | ToolProgress | CallDecision | UserMessage | Cancel | ClientHeartbeat
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFrame:
    """A frame from the client. `content` is an error where the frame itself is wrong."""

    frame_id: str
    content: Content | Exception = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers the hello."""

    client_id: ClientId
    offer_lease_seconds: float
    silence_max_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of an attached run."""

    run_id: RunId
    event: LoggedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The place of events of an attached run that are not kept any more."""

    run_id: RunId
    gap: LogGap


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A call that the client now holds."""

    call: CallView


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferRevoked:
    """A call that the client must no longer run."""

    run_id: RunId
    call_id: CallId
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The fate of a frame or a result."""

    frame_id: str
    status: Outcome
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


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """All events of a run were sent and it has ended."""

    run_id: RunId
    last_seq: int
    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHeartbeat:
    """A life sign."""


ServerFrame: TypeAlias = Welcome | Event | Gap | Offer | OfferRevoked | Receipt | End | ServerHeartbeat
