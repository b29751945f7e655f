"""The closed set of errors that a Pawl service returns.

Each reason of `pawl.error.v1.ErrorReason` has one concrete class, which is derived from the class of its kind. The
first sentence of its docstring is the default message. The chassis maps kinds to gRPC codes in one place, and restores
the same class from a reason that a peer reports.

    PawlError
      InvalidArgument: MalformedRequest, InvalidField, InvalidId, InvalidJson, InvalidSchema, InvalidArguments,
        InvalidPageToken, DigestRequired, HelloRequired, InvalidHistory, InvalidWorkflow, UnsupportedPart
      NotFound: RunNotFound, ConversationNotFound, CallNotFound, ToolNotFound, SourceNotFound, RuleNotFound,
        DocumentNotFound, NotificationNotFound, KeyNotFound, AgentNotFound, ChannelNotFound, DeliveryNotFound,
        ScheduleNotFound, TriggerNotFound, CompletionNotFound, WorkflowNotFound, NodeNotFound, RoundNotFound
      Unimplemented: MethodNotFound
      AlreadyExists: RequestIdReused, ToolExists, SourceExists, ConversationExists, ScheduleExists, TriggerExists
      FailedPrecondition: RunEnded, RunNotEnded, CallNotPending, AlreadyDecided, GrantNotOffered, DigestMismatch,
        IllegalTransition, ConversationBusy, RunOfAnotherUser, DeadlinePassed, ApprovalRequired, AttentionNotNeeded,
        SourceChanged, NoTokenBudget, AgentCycle, ForkPointOpen, ConversationErased, TriggerPaused, FeatureOff,
        ModelNotAllowed, Unreadable
      OutOfRange: SeqBeyondEnd
      Aborted: LeaseLost, InboxChanged, Conflict
      ResourceExhausted: TooLarge, Overloaded, QueueFull, TokenCeiling, PastTooLong, TooManyJobs, StorageFull,
        SlowConsumer
      Unauthenticated: SessionExpired
      PermissionDenied: BadSignature, WebhookTooOld, ForeignOrigin, ForeignHost
      Unavailable: DependencyUnavailable, SourceUnreachable, ShuttingDown
      DeadlineExceeded, Cancelled, Internal
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final, Self

_WORDS_MEET: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Kind(StrEnum):
    """The category of an error, which determines what a caller can do about it. The values are gRPC code names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    ABORTED = "ABORTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class PawlError(Exception):
    """An error that a caller may see. Its message must not contain a secret.

    `kind` determines the gRPC code, and programs branch on `reason`. `metadata` holds the values that are documented
    for the reason, as in `InvalidField(..., field="name")`.

    The names of kinds and reasons are derived from the classes. A direct subclass is a kind: NotFound is NOT_FOUND. A
    subclass of a kind is a reason: RunNotFound is RUN_NOT_FOUND.
    """

    kind: ClassVar[Kind]
    reason: str = ""
    message: str
    metadata: Mapping[str, str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name = _WORDS_MEET.sub("_", cls.__name__).upper()
        if cls.__base__ is PawlError:
            cls.kind = Kind(name)
        else:
            cls.reason = name

    def __init__(self, message: str = "", /, **metadata: str | int) -> None:
        self.message = message or _first_sentence(type(self))  # type: ignore[arg-type]  # classes are hashable
        self.metadata = MappingProxyType({key: str(value) for key, value in metadata.items()})
        super().__init__(self.message)

    @classmethod
    def restore(cls, message: str, reason: str, metadata: Mapping[str, str]) -> Self:
        """Return the error that a peer reported, even if this version does not know its reason."""
        error = cls(message, **metadata)
        error.reason = reason or cls.reason
        return error


@functools.cache
def _first_sentence(error: type[PawlError]) -> str:
    text = " ".join((inspect.getdoc(error) or error.reason).split())
    return text.partition(". ")[0].removesuffix(".")


class InvalidArgument(PawlError):
    """The request is invalid regardless of state. Sending it again does not help."""


class MalformedRequest(InvalidArgument):
    """The request bytes are not a message of the method's type."""


class InvalidField(InvalidArgument):
    """A field is missing, out of range or malformed. Metadata `field` is its name."""


class InvalidId(InvalidArgument):
    """An id does not match ^[A-Za-z0-9_-]{1,64}$. Metadata `field` is the name of its field."""


class InvalidJson(InvalidArgument):
    """The bytes are not strict JSON. The message gives the reason and the position."""


class InvalidSchema(InvalidArgument):
    """A JSON Schema is not valid under draft 2020-12, or has remote references."""


class InvalidArguments(InvalidArgument):
    """Edited arguments do not match the tool's schema. The message lists up to 20 violations."""


class InvalidPageToken(InvalidArgument):
    """The page token was issued by another method or for another filter, or was not issued at all."""


class DigestRequired(InvalidArgument):
    """The decision must include the digest of the call as shown to the user."""


class HelloRequired(InvalidArgument):
    """The first frame of a Session, and no other frame, must be `hello`."""


class InvalidHistory(InvalidArgument):
    """A history cannot be imported. The message lists up to 20 problems, each with the position of its message."""


class InvalidWorkflow(InvalidArgument):
    """The workflow's definition has faults. The message lists up to 20 of them, each with its path."""


class UnsupportedPart(InvalidArgument):
    """The models of this deployment do not support a part of the message. Metadata `part` names its kind."""


class NotFound(PawlError):
    """The object does not exist, or you cannot access it."""


class RunNotFound(NotFound):
    """The run does not exist, or you cannot access it."""


class ConversationNotFound(NotFound):
    """The conversation does not exist, or you cannot access it."""


class CallNotFound(NotFound):
    """The call does not exist, or you cannot access it."""


class ToolNotFound(NotFound):
    """The store has no such tool or no such version of the tool."""


class SourceNotFound(NotFound):
    """The store has no such tool source."""


class RuleNotFound(NotFound):
    """The store has no such rule, or you cannot access it."""


class DocumentNotFound(NotFound):
    """The store has no such document, or you cannot access it."""


class FileNotFound(NotFound):
    """The store's folder has no such file or folder."""


class NotificationNotFound(NotFound):
    """The notification does not exist, or you cannot access it."""


class KeyNotFound(NotFound):
    """The API key does not exist, or you cannot access it."""


class AgentNotFound(NotFound):
    """The agent does not exist, or you cannot use it."""


class ChannelNotFound(NotFound):
    """The channel does not exist, or you cannot access it."""


class DeliveryNotFound(NotFound):
    """The delivery does not exist, or you cannot access it."""


class ScheduleNotFound(NotFound):
    """You have no such schedule."""


class TriggerNotFound(NotFound):
    """You have no such trigger."""


class CompletionNotFound(NotFound):
    """No call in this store has this completion token. Check that the token is not truncated."""


class WorkflowNotFound(NotFound):
    """The workflow or this version of it does not exist."""


class NodeNotFound(NotFound):
    """The workflow has no node with this path."""


class RoundNotFound(NotFound):
    """The run has no model call in this round, or the events of the round were deleted."""


class Unimplemented(PawlError):
    """The service does not have the method."""


class MethodNotFound(Unimplemented):
    """No such method."""


class AlreadyExists(PawlError):
    """The name or request id is already in use."""


class RequestIdReused(AlreadyExists):
    """The request id was used before with a different payload."""


class ToolExists(AlreadyExists):
    """A tool with that name is registered with a different definition. Set `replace` to replace it."""


class SourceExists(AlreadyExists):
    """A source with that name exists with a different configuration. Set `replace` to replace it."""


class ConversationExists(AlreadyExists):
    """You already have a conversation with this key. Metadata `conversation_id` is its id.

    Continue that conversation, or choose another key.
    """


class ScheduleExists(AlreadyExists):
    """You already have a different schedule with this name. Update it, or choose another name."""


class TriggerExists(AlreadyExists):
    """You already have a different trigger with this name. Update it, or choose another name."""


class FailedPrecondition(PawlError):
    """The current state does not allow the request. Read the state again before retrying."""


class RunEnded(FailedPrecondition):
    """The run has ended. Its state can no longer change."""


class RunNotEnded(FailedPrecondition):
    """The run has not ended. Only a run that has ended can be undone."""


class NoTokenBudget(FailedPrecondition):
    """The run has no token budget of its own, so no tokens can be added."""


class CallNotPending(FailedPrecondition):
    """The call is not waiting for this input."""


class AlreadyDecided(FailedPrecondition):
    """A different decision on the call has already been made."""


class GrantNotOffered(FailedPrecondition):
    """The call is not part of a series, so it offers no grant."""


class DigestMismatch(FailedPrecondition):
    """The digest does not match the current call. Read the call again and show it to the user again."""


class IllegalTransition(FailedPrecondition):
    """The state machine does not allow the transition."""


class ConversationBusy(FailedPrecondition):
    """The conversation has an active run and the message policy is REJECT."""


class RunOfAnotherUser(FailedPrecondition):
    """The active run belongs to another user, so a message cannot steer or interrupt it. Queue the message instead."""


class DeadlinePassed(FailedPrecondition):
    """The deadline of the approval, question, offer or completion has passed."""


class ApprovalRequired(FailedPrecondition):
    """The tool needs an approval that was not given."""


class AttentionNotNeeded(FailedPrecondition):
    """The run does not need an operator's attention, or needs it for another reason."""


class SourceChanged(FailedPrecondition):
    """The source's tool definitions differ from those that were reviewed. Review the changes again."""


class AgentCycle(FailedPrecondition):
    """The agent would delegate to itself, directly or through other agents."""


class ForkPointOpen(FailedPrecondition):
    """The conversation cannot be forked at this position. Metadata `before` and `after` are the nearest valid ones."""


class ConversationErased(FailedPrecondition):
    """The conversation was erased: it accepts no messages and can no longer be read. Start another conversation."""


class TriggerPaused(FailedPrecondition):
    """The trigger is paused and does not accept events. Deliver the event again later."""


class FeatureOff(FailedPrecondition):
    """The feature is switched off for this store; metadata `feature` names the switch. The request had no effect."""


class ModelNotAllowed(FailedPrecondition):
    """The store may not use the model. Metadata `model` names it."""


class Unreadable(FailedPrecondition):
    """The stored row is damaged and cannot be read. Delete it."""


class OutOfRange(PawlError):
    """A position is beyond the end."""


class SeqBeyondEnd(OutOfRange):
    """The position is beyond the end of the log. Metadata `last_seq` is the last position."""


class Aborted(PawlError):
    """The caller's view of the state is out of date. It must read again or stop."""


class LeaseLost(Aborted):
    """The caller no longer holds the lease of the run. Stop working on it: another worker has it."""


class InboxChanged(Aborted):
    """A command arrived that the commit did not take into account. Read the inbox and decide again."""


class Conflict(Aborted):
    """Someone else changed the resource after you read it. Read it again, then repeat the request."""


class ResourceExhausted(PawlError):
    """A limit has been reached."""


class TooLarge(ResourceExhausted):
    """A message or field is over its size limit."""


class Overloaded(ResourceExhausted):
    """Too many concurrent calls or streams. Try again later."""


class QueueFull(ResourceExhausted):
    """The conversation's message queue, the run's inbox or the store's queue is full.

    Retry the same request later.
    """


class TokenCeiling(ResourceExhausted):
    """The run's token budget would exceed its maximum. Add fewer tokens."""


class PastTooLong(ResourceExhausted):
    """The fork's history would have more than 64 segments. Fork an earlier conversation, or at an earlier message."""


class TooManyJobs(ResourceExhausted):
    """The conversation already has ten open jobs. Stop one, or wait until one ends."""


class StorageFull(ResourceExhausted):
    """The store has reached its limit of stored bytes. Delete conversations, or ask for a higher limit."""


class SlowConsumer(ResourceExhausted):
    """The watcher fell behind. Metadata `resume_after_seq` is the position to resume from."""


class Unauthenticated(PawlError):
    """The credential is missing or unknown."""

    reason = "UNAUTHENTICATED"


class SessionExpired(Unauthenticated):
    """The browser session has expired. Log in again."""


class PermissionDenied(PawlError):
    """The credential does not allow the method."""

    reason = "PERMISSION_DENIED"


class BadSignature(PermissionDenied):
    """The webhook does not have a valid signature or key for its trigger."""


class WebhookTooOld(PermissionDenied):
    """The webhook's timestamp is more than five minutes off. Sign and send it again."""


class ForeignOrigin(PermissionDenied):
    """A page from another origin made the request with this session."""


class ForeignHost(PermissionDenied):
    """The gateway does not serve the requested host."""


class Unavailable(PawlError):
    """Nothing was changed, or the same request id is safe to send again later."""


class DependencyUnavailable(Unavailable):
    """A service, the database or the bus cannot be reached. The same request id is safe to send again."""


class SourceUnreachable(Unavailable):
    """The tool source does not answer, or its answer is invalid. Check the source, then try again."""


class ShuttingDown(Unavailable):
    """The process is shutting down. Retry: another replica will answer."""


class DeadlineExceeded(PawlError):
    """The deadline left too little time to do the work."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(PawlError):
    """The caller cancelled the request."""

    reason = "CANCELLED"


class Internal(PawlError):
    """Internal error. Metadata `error_id` identifies it in the log."""

    reason = "INTERNAL"


# The class of each kind, for reasons that this version does not know.
by_kind: Mapping[Kind, type[PawlError]] = MappingProxyType({error.kind: error for error in PawlError.__subclasses__()})

# Every concrete error class by its reason.
by_reason: Mapping[str, type[PawlError]] = MappingProxyType(
    {error.reason: error for kind in by_kind.values() for error in (kind, *kind.__subclasses__()) if error.reason}
)
