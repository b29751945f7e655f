"""Parses commands that raise a goal's limits, and encodes the raised limits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final

from pawl.errors import InvalidField, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rules.command import RaiseGoal
from pawl.values import TOKENS_MAX

# Maximum number of attempts of a goal.
ATTEMPTS_MAX: Final = 100


def raised(command: ledger_pb2.RaiseGoalCommand) -> RaiseGoal:
    deadline_time = messages.optional_moment(command, "deadline_time", "command.raise_goal.")
    if not (command.attempts or command.tokens or deadline_time):
        raise InvalidField("set attempts, deadline_time or tokens", field="attempts")
    if command.tokens > TOKENS_MAX:
        raise InvalidField(f"tokens must be at most {TOKENS_MAX}, got {command.tokens}", field="tokens")
    return RaiseGoal(tokens=command.tokens, check=partial(_check, command.attempts, deadline_time))


def encoded(request: ledger_pb2.CommitRunRequest) -> bytes:
    """Return a goal's raised limits as an encoded Run.

    Appending it to the run's options replaces their limits.
    """
    return run_pb2.Run(goal=request.goal_limits).SerializeToString() if request.HasField("goal_limits") else b""


def _check(attempts: int, deadline_time: datetime | None, encoded_run: bytes, unread: Sequence[bytes]) -> None:
    """Check that a goal's limits can be raised. `unread` contains the accepted commands that no worker has read yet.

    Raises:
        RunNotFound: The run is not a goal run.
        InvalidField: There would be more than 100 attempts, or the deadline would not be later.
    """
    run = run_pb2.Run.FromString(encoded_run)
    if not run.HasField("goal"):
        raise RunNotFound("the run is not a goal run")
    for raised in (ledger_pb2.Command.FromString(payload).raise_goal for payload in unread):
        run.goal.attempts_max += raised.attempts
        if raised.HasField("deadline_time"):
            run.goal.deadline_time.CopyFrom(raised.deadline_time)
    if run.goal.attempts_max + attempts > ATTEMPTS_MAX:
        message = f"a goal can have at most {ATTEMPTS_MAX} attempts, and this one already has {run.goal.attempts_max}"
        raise InvalidField(message, field="attempts")
    current = messages.optional_moment(run.goal, "deadline_time")
    if deadline_time is not None and (current is None or deadline_time <= current):
        than = "the goal has no deadline" if current is None else f"it must be later than {current:%Y-%m-%d %H:%M:%S}Z"
        raise InvalidField(f"deadline_time: {than}", field="deadline_time")
