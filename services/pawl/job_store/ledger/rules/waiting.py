"""Reasons why a run is not making progress. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final

import msgspec

from pawl.chassis.identity.roles import APPROVERS, Role
from pawl.chassis.ids import CallId, RunId, UserId
from pawl.chassis.visible import shortened
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.states import AttentionReason, WaitReason
from pawl.job_store.ledger.rules.usage import day_end, month_end
from pawl.values import CallState, RunState, WaitKind

# Maximum number of calls, and of runs, that a reason lists.
NAMED_MAX: Final = 20
# Only this many of a run's newest calls are counted.
COUNTED_MAX: Final = 1000

_SENTENCE_BYTES_MAX: Final = 2048
_TOOLS_MAX: Final = 3

_W = WaitReason
_REASONS: Final[Mapping[int, WaitReason]] = MappingProxyType(
    {
        WaitKind.APPROVAL: _W.APPROVAL,
        WaitKind.ANSWER: _W.ANSWER,
        WaitKind.TOOL_RESULT: _W.FRONT_END,
        WaitKind.BUDGET: _W.TOKENS,
        WaitKind.AGENT: _W.AGENT,
        WaitKind.AGENT_QUOTA: _W.AGENT_QUOTA,
        WaitKind.TIME: _W.TIME,
        WaitKind.PAUSED: _W.PAUSED,
        WaitKind.COMPLETION: _W.COMPLETION,
        WaitKind.PROVIDER: _W.PROVIDER,
        WaitKind.EVENT: _W.EVENT,
        WaitKind.JOB: _W.JOB,
        WaitKind.PERSON: _W.ANSWER,
        WaitKind.STORE_DAILY_TOKENS: _W.STORE_TOKENS,
        WaitKind.STORE_MONTHLY_TOKENS: _W.STORE_TOKENS,
        WaitKind.USER_DAILY_TOKENS: _W.USER_TOKENS,
        WaitKind.USER_MONTHLY_TOKENS: _W.USER_TOKENS,
        WaitKind.RATE: _W.RATE,
    }
)
_REASONS_OF_CALLS: Final[Mapping[CallState, WaitReason]] = MappingProxyType(
    {
        CallState.AWAITING_APPROVAL: _W.APPROVAL,
        CallState.ASKED: _W.ANSWER,
        CallState.OFFERED: _W.FRONT_END,
        CallState.DELEGATED: _W.AGENT,
    }
)
_RAISE: Final = (
    "It continues automatically then, or once an admin raises the {}'s limit. `pawl settings explain` shows the limits."
)
_REMEDIES: Final[Mapping[WaitReason, str]] = MappingProxyType(
    {
        _W.APPROVAL: "Approve, edit or reject it, as an approver or admin of the store, or as its user without roles.",
        _W.ANSWER: "Its user must answer.",
        _W.FRONT_END: "One of its user's front ends must run the call, or a client must return its result.",
        _W.TOKENS: "Its user must add tokens with a top-up.",
        _W.AGENT: "That run must end. Its status shows what it is waiting for.",
        _W.TURN: "The runs before it must end or be cancelled.",
        _W.PLACE: "Another run must end or start waiting: the slot goes to the oldest run that needs one.",
        _W.WORKER: "A worker will claim it automatically. If no worker does, check that an agent-loop is running.",
        _W.AGENT_QUOTA: "It continues automatically after the day (UTC), or once an admin gives the agent more tokens.",
        _W.STORE_TOKENS: _RAISE.format("store"),
        _W.USER_TOKENS: _RAISE.format("user"),
        _W.RATE: "It continues automatically once the limit allows it.",
        _W.TIME: "It continues automatically at that time.",
        _W.PAUSED: "Its user must resume it: `pawl jobs resume JOB` or `pawl workflows resume RUN`.",
        _W.COMPLETION: "The holder of the call's token must complete it (CompletionService.CompleteCall).",
        _W.PROVIDER: "It retries the model server automatically; if that keeps failing, see `pawl model check`.",
        _W.EVENT: "The event must be sent: `pawl workflows event RUN NAME`, or WorkflowService.SendEvent.",
        _W.JOB: "The jobs must end or be stopped. `pawl jobs list` shows them.",
        _W.STOPPING: "Its worker settles the open calls automatically.",
    }
)
_OF_ITS_USER: Final = frozenset({_W.ANSWER, _W.FRONT_END, _W.TOKENS, _W.PAUSED, _W.EVENT})
_DECIDERS: Final = tuple(sorted(role.value for role in APPROVERS))
_OPERATORS: Final = (Role.ADMIN.value, Role.OPERATOR.value)
_ROLES: Final[Mapping[WaitReason, tuple[str, ...]]] = MappingProxyType(
    {_W.APPROVAL: _DECIDERS} | dict.fromkeys((_W.AGENT_QUOTA, _W.STORE_TOKENS, _W.USER_TOKENS), (Role.ADMIN.value,))
)


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at `time`, with context that its row does not contain.

    `calls` are the run's open calls, in call order. `is_cut` means that there are more open calls. `call_counts` and
    `child_run_ids` cover its newest calls. `before` lists the runs ahead of this run in the conversation, starting with
    the active run. The used slots of its store and user are counted only while the run needs a slot.
    """

    run: RunRow
    time: datetime
    calls: Sequence[CallRow] = ()
    is_cut: bool = False
    call_counts: Sequence[tuple[CallState, int]] = ()
    child_run_ids: tuple[RunId, ...] = ()
    before: tuple[RunId, ...] = ()
    store_slots_used: int = 0
    user_slots_used: int = 0

    @property
    def queue_position(self) -> int:
        """The position in the conversation's queue, starting at 1. It is 0 if the run is not queued."""
        return len(self.before)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    reason: WaitReason
    sentence: str
    remedy: str
    since_time: datetime
    deadline_time: datetime | None = None
    user_ids: tuple[UserId, ...] = ()
    roles: tuple[str, ...] = ()
    call_ids: tuple[CallId, ...] = ()
    run_ids: tuple[RunId, ...] = ()


def explain(
    situation: Situation, limits: SlotLimits, below: Mapping[RunId, Waiting] = MappingProxyType({})
) -> Waiting | None:
    """Return why the run is not making progress, or None if it is RUNNING or has ended.

    `below` contains the reasons why the runs that execute its calls are waiting, if known.
    """
    run = situation.run
    match run.state:
        case RunState.QUEUED:
            return _queued(situation, limits)
        case RunState.WAITING:
            return _parked(situation, below)
        case RunState.NEEDS_ATTENTION:
            return _in_need(situation)
        case RunState.CANCELLING:
            return _simple(
                situation, _W.STOPPING, "It is being stopped: its open calls are being settled.", run.state_time
            )
        case _:
            return None


def explain_all(situations: Sequence[Situation], limits: SlotLimits) -> Waiting | None:
    """Return why the first run is not making progress. The other runs execute its calls, directly or indirectly."""
    known: dict[RunId, Waiting] = {}
    # Newest first: a run is created after the run whose call it executes.
    for situation in sorted(situations[1:], key=lambda each: each.run.create_time, reverse=True):
        waiting = explain(situation, limits, known)
        if waiting is not None:
            known[situation.run.run_id] = waiting
    return explain(situations[0], limits, known)


def _queued(situation: Situation, limits: SlotLimits) -> Waiting:
    run = situation.run
    if run.queued_message is not None:
        others = len(situation.before) - 1
        more = f", with {others} more ahead of it" if others > 0 else ""
        who = f"run {situation.before[0]}" if situation.before else "another run"
        sentence = f"It is waiting for its turn in the conversation: {who} is active{more}."
        return _simple(situation, _W.TURN, sentence, run.create_time, run_ids=situation.before[:NAMED_MAX])
    if run.worker_id is None and situation.store_slots_used >= limits.per_store:
        sentence = f"It is waiting for a slot: its store has {limits.per_store} active runs, which is the maximum."
        return _simple(situation, _W.PLACE, sentence, _due_since(situation))
    if run.worker_id is None and situation.user_slots_used >= limits.per_user:
        sentence = f"It is waiting for a slot: its user has {limits.per_user} active runs, which is the maximum."
        return _simple(situation, _W.PLACE, sentence, _due_since(situation))
    return _for_worker(situation, "It is waiting for a worker.")


def _for_worker(situation: Situation, sentence: str) -> Waiting:
    run = situation.run
    if run.worker_id is not None and _is_due(situation, unowned_only=True):
        sentence = "Its worker was lost: the next worker continues it."
    elif run.worker_id is not None:
        sentence = "A worker has claimed it and is about to continue."
    elif run.crashes and run.claim_at is not None and run.claim_at > situation.time:
        sentence = "Its worker failed: the run pauses for a moment before the next worker claims it."
    return _simple(situation, _W.WORKER, sentence, _due_since(situation))


def _in_need(situation: Situation) -> Waiting:
    run = situation.run
    since = run.attention.since_time if run.attention is not None else run.state_time
    calls = [call for call in situation.calls if call.state is CallState.RUNNING and is_pending(run, call)]
    if run.attention is not None and run.attention.reason is AttentionReason.QUARANTINED:
        died = f"{run.crashes} workers died while running it" if run.crashes > 1 else "its worker died"
        sentence = f"It is quarantined: {died}, without any progress in between."
        remedy = "An operator must find the cause, then re-drive or end the run."
    elif not calls and not situation.is_cut and _is_due(situation):
        return _for_worker(situation, "An operator has resolved its call: it is waiting for a worker.")
    else:
        which = _tools(calls) or "a call"
        sentence = f"An operator must resolve {which}: it is unknown whether it took effect."
        remedy = "An operator must report what happened, or end the run."
    return Waiting(
        reason=_W.OPERATOR,
        sentence=shortened(sentence, _SENTENCE_BYTES_MAX),
        remedy=remedy,
        since_time=since,
        roles=_OPERATORS,
        call_ids=tuple(call.call_id for call in calls[:NAMED_MAX]),
    )


def _parked(situation: Situation, below: Mapping[RunId, Waiting]) -> Waiting:
    run = situation.run
    calls = _waited_for(situation)
    reasons = sorted({*calls, *_unseen(situation)})
    if not reasons and not _is_due(situation):
        reasons = sorted({_REASONS[wait] for wait in run.waits})
    if not reasons:
        return _for_worker(situation, "It is no longer waiting for anything else: it is waiting for a worker.")
    first = reasons[0]
    about = calls.get(first, [])
    children = [call.child_run_id for call in calls.get(_W.AGENT, [])]
    sentence = f"It is waiting for {', and for '.join(_part(run, each, calls.get(each, [])) for each in reasons)}."
    known = [(child, below[child]) for child in children if child in below]
    sentence += "".join(f" Run {child}: {waiting.sentence}" for child, waiting in known)
    there = known[0][1] if known and first is _W.AGENT else None
    one_is_enough = first is _W.APPROVAL and all(call.approvals_required == 1 for call in about)
    own = _asked(run, about) if first in _OF_ITS_USER or one_is_enough else ()
    return Waiting(
        reason=first,
        sentence=shortened(sentence, _SENTENCE_BYTES_MAX),
        remedy=there.remedy if there else _REMEDIES[first],
        since_time=min((call.state_time for call in about), default=run.state_time),
        deadline_time=_deadline(situation, first),
        user_ids=there.user_ids if there else own,
        roles=there.roles if there else () if _is_named(about) else _ROLES.get(first, ()),
        call_ids=tuple(call.call_id for call in about[:NAMED_MAX]),
        run_ids=tuple(children[:NAMED_MAX]) if first is _W.AGENT else (),
    )


def _asked(run: RunRow, calls: Sequence[CallRow]) -> tuple[UserId, ...]:
    """Return the users whose answer is needed: those named in the calls, or the run's user."""
    asked = (run.user_id if call.asked_user_id is None else call.asked_user_id for call in calls)
    return tuple(dict.fromkeys(filter(None, asked))) if calls else (run.user_id,)


def _is_named(calls: Sequence[CallRow]) -> bool:
    """Return whether only users who are named in the calls may decide on them."""
    return bool(calls) and all(call.asked_user_id for call in calls)


def _deadline(situation: Situation, reason: WaitReason) -> datetime | None:
    due_time, now = situation.run.claim_at, situation.time
    if due_time is None or due_time <= now:
        return None
    if reason not in {_W.AGENT_QUOTA, _W.STORE_TOKENS, _W.USER_TOKENS}:
        return due_time
    # A worker checks the budget before the period ends, so `claim_at` is earlier.
    return month_end(now) if _is_monthly(situation.run) else day_end(now)


def _is_monthly(run: RunRow) -> bool:
    return not {WaitKind.STORE_MONTHLY_TOKENS, WaitKind.USER_MONTHLY_TOKENS}.isdisjoint(run.waits)


def _waited_for(situation: Situation) -> dict[WaitReason, list[CallRow]]:
    found: dict[WaitReason, list[CallRow]] = {}
    run = situation.run
    awaits_completion = WaitKind.COMPLETION in run.waits and not _is_due(situation)
    for call in situation.calls:
        if awaits_completion and call.state is CallState.RUNNING and not call.reserved_by:
            found.setdefault(_W.COMPLETION, []).append(call)
        reason = _REASONS_OF_CALLS.get(call.state)
        waits = call.state is CallState.DELEGATED and not call.reserved_by
        if reason is not None and (waits or is_pending(run, call)):
            found.setdefault(reason, []).append(call)
    return found


def _unseen(situation: Situation) -> set[WaitReason]:
    of_calls, is_due = set(_REASONS_OF_CALLS.values()), _is_due(situation)
    named = {_REASONS[wait] for wait in situation.run.waits}
    return {reason for reason in named if (situation.is_cut if reason in of_calls else not is_due)}


def _part(run: RunRow, reason: WaitReason, calls: Sequence[CallRow]) -> str:
    match reason:
        case _W.APPROVAL:
            return _approvals(calls)
        case _W.ANSWER:
            count = f"{len(calls)} answers" if len(calls) > 1 else "an answer"
            return f"{count} from {_listed(_asked(run, calls), len(_asked(run, calls)))}"
        case _W.FRONT_END:
            return f"a front end to run {_tools(calls) or 'a tool'}"
        case _W.TOKENS:
            return "more tokens: its budget is nearly used up"
        case _W.AGENT_QUOTA:
            return f"the next day: the agent {run.agent_name} has used up its daily tokens"
        case _W.STORE_TOKENS | _W.USER_TOKENS:
            whose = "its store" if reason is _W.STORE_TOKENS else "its user"
            next_period, period = ("next month", "monthly") if _is_monthly(run) else ("next day", "daily")
            return f"the {next_period}: {whose} has used up the {period} tokens"
        case _W.RATE:
            return "a model call: its store or model server has reached its limit per minute"
        case _W.PROVIDER:
            return "the model server, which is unavailable"
        case _W.TIME:
            return "the time of its next step"
        case _W.EVENT:
            return "an event"
        case _W.JOB:
            return "the background jobs below it"
        case _W.PAUSED:
            return "its user to resume it: it is paused"
        case _W.COMPLETION:
            return f"an external system to complete {_tools(calls) or 'a call'}"
        case _W.AGENT:
            shown = [call.child_run_id for call in calls[:_TOOLS_MAX]]
            return _listed([f"run {child}" for child in shown], len(calls)) or "another run"
        case _:
            raise ValueError(f"no run is waiting for {reason.name}")


def _approvals(calls: Sequence[CallRow]) -> str:
    if len(calls) == 1 and calls[0].approvals_required > 1:
        call = calls[0]
        what = f"{call.approvals_required} approvals{_of(calls)} ({len(call.approvals)} given)"
    else:
        what = f"an approval{_of(calls)}"
        if _is_named(calls):
            what += f" by {_listed([call.asked_user_id or '' for call in calls[:_TOOLS_MAX]], len(calls))}"
    return f"{what} (requested twice, not decided in time)" if any(call.escalated for call in calls) else what


def _of(calls: Sequence[CallRow]) -> str:
    # A workflow's approval has no tool. Its call is named "approval".
    if calls and all(call.tool_name == "approval" for call in calls):
        return ""
    return f" of {_tools(calls) or 'a call'}"


def _tools(calls: Sequence[CallRow]) -> str:
    names = list(dict.fromkeys(call.tool_name for call in calls))
    return _listed(names[:_TOOLS_MAX], len(names))


def _listed(shown: Sequence[str], count: int) -> str:
    more = count - len(shown)
    parts = [*shown, *([f"{more} more"] if more else [])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else ""


def _simple(
    situation: Situation,
    reason: WaitReason,
    sentence: str,
    since: datetime,
    *,
    run_ids: tuple[RunId, ...] = (),
) -> Waiting:
    return Waiting(
        reason=reason,
        sentence=shortened(sentence, _SENTENCE_BYTES_MAX),
        remedy=_REMEDIES[reason],
        since_time=min(since, situation.time),
        run_ids=run_ids,
    )


def _is_due(situation: Situation, *, unowned_only: bool = False) -> bool:
    """Return whether a worker holds the run or may claim it. With `unowned_only`, only the latter counts."""
    run = situation.run
    may_take = run.claim_at is not None and run.claim_at <= situation.time
    return may_take or (run.worker_id is not None and not unowned_only)


def _due_since(situation: Situation) -> datetime:
    run = situation.run
    is_free = run.worker_id is None and run.claim_at is not None and run.claim_at <= situation.time
    return run.claim_at if is_free and run.claim_at is not None else run.state_time
