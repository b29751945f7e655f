"""The closed set of errors that a Pawl service returns.

One concrete class per reason of `pawl.error.v1.ErrorReason`, each below the
class of its kind. The chassis maps a kind to a gRPC code in one place, and turns
a reason that comes from a peer back into the same class.

    PawlError
      InvalidArgument: MalformedRequest, InvalidField, InvalidId, InvalidJson, InvalidSchema, InvalidArguments,
        InvalidPageToken, DigestRequired, HelloRequired, InvalidHistory, UnsupportedPart
      NotFound: RunNotFound, ConversationNotFound, CallNotFound, ToolNotFound, SourceNotFound, RuleNotFound,
        DocumentNotFound, NotificationNotFound, KeyNotFound, AgentNotFound, ChannelNotFound, DeliveryNotFound,
        ScheduleNotFound, TriggerNotFound, CompletionNotFound
      Unimplemented: MethodNotFound
      AlreadyExists: RequestIdReused, ToolExists, SourceExists, ConversationExists, ScheduleExists,
        TriggerExists
      FailedPrecondition: RunEnded, RunNotEnded, CallNotPending, AlreadyDecided, GrantNotOffered, DigestMismatch,
        IllegalTransition, ConversationBusy, RunOfAnotherUser, DeadlinePassed, ApprovalRequired,
        AttentionNotNeeded, SourceChanged, NoTokenBudget, AgentCycle, ForkPointOpen,
        TriggerPaused, Unreadable
      OutOfRange: SeqBeyondEnd
      Aborted: LeaseLost, InboxChanged
      ResourceExhausted: TooLarge, Overloaded, QueueFull, TokenCeiling, PastTooLong, SlowConsumer
      Unauthenticated: SessionExpired
      PermissionDenied: BadSignature, WebhookTooOld, ForeignOrigin, ForeignHost
      Unavailable: DependencyUnavailable, SourceUnreachable, ShuttingDown
      DeadlineExceeded
      Cancelled
      Internal

The docstring of a concrete class is its message where the raiser gives none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final, Self

_WORDS_MEET: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Kind(StrEnum):
    """The remedy that a caller has for an error, named like the gRPC code it becomes."""

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
    """An error that a caller may see. Its message must not hold a secret.

    `kind` fixes the gRPC code, `reason` is what programs branch on, `metadata`
    are the values that the reason promises (`InvalidField(..., field="name")`).
    A class below this one is a kind and has its name: NOT_FOUND is NotFound. The
    reason of a class below a kind is its name: RUN_NOT_FOUND of RunNotFound.
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
        self.message = message or _first_sentence(type(self))
        self.metadata = MappingProxyType({key: str(value) for key, value in metadata.items()})
        super().__init__(self.message)

    @classmethod
    def restore(cls, message: str, reason: str, metadata: Mapping[str, str]) -> Self:
        """Return the error that a peer reported, also for a reason this version does not know."""
        error = cls(message, **metadata)
        error.reason = reason or cls.reason
        return error


def _first_sentence(error: type[PawlError]) -> str:
    text = " ".join((inspect.getdoc(error) or error.reason).split())
    return text.partition(". ")[0].removesuffix(".")


class InvalidArgument(PawlError):
    """The request is wrong whatever the state is; sending it again does not help."""


class MalformedRequest(InvalidArgument):
    """The request bytes are not a message of the method's type."""


class InvalidField(InvalidArgument):
    """A field is missing, out of range or of the wrong form. Metadata `field` names it."""


class InvalidId(InvalidArgument):
    """An id does not match ^[A-Za-z0-9_-]{1,64}$. Metadata `field` names it."""


class InvalidJson(InvalidArgument):
    """JSON bytes are not strict JSON. The message says where and why."""


class InvalidSchema(InvalidArgument):
    """A JSON Schema is not valid 2020-12, or has remote references."""


class InvalidArguments(InvalidArgument):
    """Edited arguments do not fit the tool's schema. The message lists every violation."""


class InvalidPageToken(InvalidArgument):
    """A page token was not made by this method for this filter."""


class DigestRequired(InvalidArgument):
    """A decision came without the digest that was shown."""


class HelloRequired(InvalidArgument):
    """The first frame of a Session must be `hello`, and only the first."""


class InvalidHistory(InvalidArgument):
    """A history cannot be imported. The message lists every fault, with the position of its message."""


class UnsupportedPart(InvalidArgument):
    """The models of the deployment do not take a part of the message. Metadata `part` names its kind."""


class NotFound(PawlError):
    """There is no such thing, or none that the caller may see."""


class RunNotFound(NotFound):
    """No such run, or none that the caller may see."""


class ConversationNotFound(NotFound):
    """No such conversation, or none that the caller may see."""


class CallNotFound(NotFound):
    """No such call, or none that the caller may see."""


class ToolNotFound(NotFound):
    """No such tool or tool version in this store."""


class SourceNotFound(NotFound):
    """No such source of tools in this store."""


class RuleNotFound(NotFound):
    """No such rule in this store, or none that the caller may see."""


class DocumentNotFound(NotFound):
    """No such document in this store, or none that the caller may see."""


class NotificationNotFound(NotFound):
    """No such notification, or none that the caller may see."""


class KeyNotFound(NotFound):
    """No such API key, or none that the caller may see."""


class AgentNotFound(NotFound):
    """No such agent, or none that the caller may use."""


class ChannelNotFound(NotFound):
    """No such channel, or none that the caller may see."""


class DeliveryNotFound(NotFound):
    """No such delivery of a channel, or none that the caller may see."""


class ScheduleNotFound(NotFound):
    """You have no such schedule."""


class TriggerNotFound(NotFound):
    """You have no such trigger."""


class CompletionNotFound(NotFound):
    """The token completes no call of this store. Look whether it is whole."""


class Unimplemented(PawlError):
    """The service does not have the method."""


class MethodNotFound(Unimplemented):
    """No such method."""


class AlreadyExists(PawlError):
    """The name or request id is taken by something else."""


class RequestIdReused(AlreadyExists):
    """The request id was used before with another payload."""


class ToolExists(AlreadyExists):
    """A tool of that name is registered with another definition. Set `replace` to put this one in its place."""


class SourceExists(AlreadyExists):
    """A source of that name is there with another configuration. Set `replace` to put this one in its place."""


class ConversationExists(AlreadyExists):
    """You have a conversation with this key: metadata `conversation_id`. Go on there, or choose another key."""


class ScheduleExists(AlreadyExists):
    """You have a schedule of this name that does something else. Update it, or choose another name."""


class TriggerExists(AlreadyExists):
    """You have a trigger of this name that does something else. Update it, or choose another name."""


class FailedPrecondition(PawlError):
    """The state does not allow the request; read it again before another attempt."""


class RunEnded(FailedPrecondition):
    """The run has ended. Its state never changes again."""


class RunNotEnded(FailedPrecondition):
    """The run has not ended: only one that has can be undone."""


class NoTokenBudget(FailedPrecondition):
    """The run has no token budget of its own, so there is nothing to add to."""


class CallNotPending(FailedPrecondition):
    """The call is not waiting for what was sent."""


class AlreadyDecided(FailedPrecondition):
    """The call was decided before, by another decision."""


class GrantNotOffered(FailedPrecondition):
    """The call is decided by itself: no series can be granted with it."""


class DigestMismatch(FailedPrecondition):
    """The digest does not match the call as it is now.

    Read the call again and show it to the person again.
    """


class IllegalTransition(FailedPrecondition):
    """The state tables do not allow the transition."""


class ConversationBusy(FailedPrecondition):
    """The conversation has an active run and the policy asked for is REJECT."""


class RunOfAnotherUser(FailedPrecondition):
    """The active run of the conversation is of another user: a message neither enters nor interrupts it. Queue it."""


class DeadlinePassed(FailedPrecondition):
    """The approval, question, offer or completion has passed its deadline."""


class ApprovalRequired(FailedPrecondition):
    """The tool needs an approval that was not given."""


class AttentionNotNeeded(FailedPrecondition):
    """The run does not wait for an operator, or not for this."""


class SourceChanged(FailedPrecondition):
    """The source describes its tools differently from what was shown: look at the changes again."""


class AgentCycle(FailedPrecondition):
    """The agents to which an agent delegates lead back to it."""


class ForkPointOpen(FailedPrecondition):
    """The conversation cannot be forked there. Metadata `before` and `after` are the nearest numbers where it can."""


class ConversationErased(FailedPrecondition):
    """The conversation was erased: it takes no messages, and nothing of it can be read. Begin another one."""


class TriggerPaused(FailedPrecondition):
    """The trigger is paused and takes no events. Deliver it again later."""


class Unreadable(FailedPrecondition):
    """The stored row cannot be read: it is damaged. Delete it."""


class OutOfRange(PawlError):
    """A position lies beyond the end."""


class SeqBeyondEnd(OutOfRange):
    """The position is beyond the end of the log. Metadata `last_seq` says where the log ends."""


class Aborted(PawlError):
    """The caller works on an old view; it must read again or stop."""


class LeaseLost(Aborted):
    """The caller no longer holds the lease of the run. Stop working on it: somebody else does."""


class InboxChanged(Aborted):
    """A command arrived that the commit did not take into account.

    Read the inbox and decide again.
    """


class ResourceExhausted(PawlError):
    """A limit is reached."""


class TooLarge(ResourceExhausted):
    """A message or field is over its size limit."""


class Overloaded(ResourceExhausted):
    """Too many calls or streams at once. Try again later."""


class QueueFull(ResourceExhausted):
    """The conversation's queue of waiting messages, the inbox of the run, or the queue of the store is full.

    The same request may be sent again later.
    """


class TokenCeiling(ResourceExhausted):
    """The run's token budget may not become that large. Add fewer tokens."""


class PastTooLong(ResourceExhausted):
    """The past of the fork would have more than 64 parts. Fork an earlier conversation, or at an earlier message."""


class TooManyJobs(ResourceExhausted):
    """Ten jobs of the conversation are open. Stop one, or wait until one ends."""


class SlowConsumer(ResourceExhausted):
    """The watcher fell behind. Metadata `resume_after_seq` says where to attach again."""


class Unauthenticated(PawlError):
    """No credential, or one that is not known."""

    reason = "UNAUTHENTICATED"


class SessionExpired(Unauthenticated):
    """The session of a browser is over. Log in again."""


class PermissionDenied(PawlError):
    """The credential does not allow the method."""

    reason = "PERMISSION_DENIED"


class BadSignature(PermissionDenied):
    """The webhook shows no signature, or key, of the trigger that it is for."""


class WebhookTooOld(PermissionDenied):
    """The time of the webhook is more than five minutes from now. Send it again, signed anew."""


class ForeignOrigin(PermissionDenied):
    """A page of another origin made the request, with the session of this one."""


class ForeignHost(PermissionDenied):
    """The gateway does not answer to the host that was asked for."""


class Unavailable(PawlError):
    """Nothing was changed, or the same request id is safe to send again, later."""


class DependencyUnavailable(Unavailable):
    """A service, the database or the bus cannot be reached.

    Nothing was changed, or it is safe to send the same request id again.
    """


class SourceUnreachable(Unavailable):
    """A source of tools does not answer, or not as it should. Look at the source, then try again."""


class ShuttingDown(Unavailable):
    """The process is shutting down. Send again: another replica will answer."""


class DeadlineExceeded(PawlError):
    """The deadline left too little time to do the work."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(PawlError):
    """The caller cancelled the request."""

    reason = "CANCELLED"


class Internal(PawlError):
    """Internal error. Metadata `error_id` finds it in the log."""

    reason = "INTERNAL"


by_kind: Mapping[Kind, type[PawlError]] = MappingProxyType({error.kind: error for error in PawlError.__subclasses__()})
"""The class of each kind, for a reason that this version does not know."""

by_reason: Mapping[str, type[PawlError]] = MappingProxyType(
    {error.reason: error for kind in by_kind.values() for error in (kind, *kind.__subclasses__()) if error.reason}
)
"""Every concrete error by its reason."""
