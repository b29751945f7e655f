"""Converts command replies to receipts, runs or errors."""

from __future__ import annotations

from typing import Final, TypeAlias

from pawl.agent.v1.types_pb2 import Receipt
from pawl.errors import CallNotPending, NotFound, PawlError, RunEnded, RunNotFound, by_reason
from pawl.event.v1.run_pb2 import Run
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import CommandOutcome

Reply: TypeAlias = pb.SendCommandResponse

ACCEPTED: Final = Reply(outcome=pb.COMMAND_OUTCOME_ACCEPTED)


def is_taken(reply: Reply) -> bool:
    """Return whether the command has taken effect, either now or earlier."""
    return CommandOutcome(reply.outcome).is_taken


def run_after(reply: Reply, default: type[PawlError], *, also_late: bool = False) -> Run:
    """Return the run after a command that took effect. With `also_late`, return it even if the command had no effect.

    Raises:
        PawlError: The error that corresponds to the reply's reason, or `default` if there is none.
    """
    if reply.HasField("run") and (also_late or is_taken(reply)):
        return reply.run
    raise by_reason.get(reply.reason, default)(reply.message)


def decided(reply: Reply) -> Run:
    """Return the run after an accepted command for a call.

    Raises:
        RunNotFound, CallNotFound, CallNotPending
        PawlError: The error that corresponds to the reply's reason.
    """
    try:
        return run_after(reply, RunNotFound if reply.outcome == pb.COMMAND_OUTCOME_UNKNOWN else CallNotPending)
    except RunEnded as error:
        raise CallNotPending(error.message) from None


def refusal(error: PawlError) -> Reply:
    outcome = pb.COMMAND_OUTCOME_UNKNOWN if isinstance(error, NotFound) else pb.COMMAND_OUTCOME_REFUSED
    return Reply(outcome=outcome, reason=error.reason, message=error.message)


def receipt(reply: Reply, *, frame_id: str = "", run_id: str = "", call_id: str = "") -> Receipt:
    """Return a receipt for the client. The receipt has a reason only if the command did not take effect."""
    reason, message = ("", "") if is_taken(reply) else (reply.reason, reply.message)
    return Receipt(
        frame_id=frame_id,
        status=reply.outcome,  # type: ignore[arg-type]  # the same numbers
        reason=reason,
        message=message,
        run_id=run_id,
        call_id=call_id,
    )
