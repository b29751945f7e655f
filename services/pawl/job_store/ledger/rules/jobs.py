"""Jobs, which are background runs, and the notices that they send to their conversation.

A notice refers to an iteration of a job or to the job's end. The content comes from the job's run when the model is
called, so nothing is stored twice.

A notice belongs to the user who started the job, and enters only that user's runs. The owner of the active run adds the
notices in the step that starts a model call. If there is no active run, the ledger starts a *turn*. A turn is a run of
that user without a message. The notices are its only new input. A message from the same user takes precedence over a
turn that has not started. A user who may no longer write to the conversation gets no notices, but the jobs keep their
results.

Jobs below a delegated run report to the root conversation too, but their notices enter the nearest delegated run above
them that is still open. Each delegated run that ends passes its notices on (`agent_ended`).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey, UserId
from pawl.errors import IllegalTransition
from pawl.job_store.ledger.rules import turn
from pawl.job_store.ledger.rules.background import Notice, OpenJob, TurnTime
from pawl.job_store.ledger.rules.calls import people_of
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork, Wakeup
from pawl.values import Feature, RunState, StopCause, WaitKind

# Maximum number of open jobs per user in a conversation (ASYNC-7).
OPEN_MAX: Final = 10
# Maximum length of a chain of turns, each started by a job of the previous one, without a user message.
GENERATIONS_MAX: Final = 5
# Maximum number of turns per user in a conversation within `TURNS_PERIOD`.
TURNS_MAX: Final = 30
# Maximum number of these turns that job iterations may start. The rest is reserved for the ends of jobs.
PROGRESS_TURNS_MAX: Final = 20
TURNS_PERIOD: Final = timedelta(hours=1)
# Minimum time between two turns of a conversation (ASYNC-5).
TURN_DISTANCE: Final = timedelta(seconds=2)
# After this many failed turns, a notice waits for a message from the user.
TRIES_MAX: Final = 3


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """A notice passed to the model. `occasion` is an iteration of the job `run_id`, or 0 for the job's end."""

    run_id: RunId
    occasion: int


def add_open_job(
    unit: UnitOfWork,
    conversation: ConversationRow,
    run_id: RunId,
    user_id: UserId,
    *,
    agents_above: tuple[RunId, ...] = (),
) -> ConversationRow:
    """Add a new job that reports to `conversation`. Return the conversation.

    Raises:
        IllegalTransition: The user has too many open jobs in the conversation.
    """
    background = conversation.background
    if background.open_jobs_of(user_id) >= OPEN_MAX:
        raise IllegalTransition(f"this user already has {OPEN_MAX} open jobs in the conversation")
    job = OpenJob(run_id=run_id, user_id=user_id, above=agents_above if len(agents_above) > 1 else ())
    background = replace(background, open_jobs=(*background.open_jobs, job))
    return unit.put_conversation(replace(conversation, background=background))


def notify(unit: UnitOfWork, job: RunRow, occasion: int) -> None:
    """Add a notice to the job's conversation, about the iteration `occasion` or, if that is 0, about the job's end.

    Only the last iteration of a job can have a pending notice. An `occasion` above the job's round is a progress
    report, which the end of the job replaces. No notice is added for silent jobs, for the end of a job that the model
    stopped, for erased conversations, or for users who may no longer write.
    """
    conversation = unit.conversations.get(ConversationKey(job.store_id, job.reports_to))
    if conversation is None or not conversation.user_id:
        return
    background = conversation.background
    is_end = occasion == 0
    notices = background.notices
    first = job.round + 1 if is_end else 1
    notices = tuple(each for each in notices if each.run_id != job.run_id or each.occasion < first or each.entered_by)
    is_known = is_end and job.state is RunState.CANCELLED and job.stop_cause is StopCause.MODEL
    is_notified = conversation.takes_messages_of(job.user_id) and not (is_known or job.silent)
    above = next((each.above for each in background.open_jobs if each.run_id == job.run_id), ())
    notice = Notice(run_id=job.run_id, user_id=job.user_id, occasion=occasion, above=above)
    if is_notified:
        notices = (*notices, notice)
    still_open = tuple(each for each in background.open_jobs if not is_end or each.run_id != job.run_id)
    background = replace(background, notices=notices, open_jobs=still_open)
    conversation = unit.put_conversation(replace(conversation, background=background))
    receiver = notice.receiver or conversation.active_run_id
    if is_end or is_notified:
        _wake_waiting(unit, RunKey(job.store_id, notice.receiver))
    if not is_notified:
        return
    if receiver is None:
        _start_turn(unit, conversation, job, TURNS_MAX if is_end else PROGRESS_TURNS_MAX)
    else:
        _wake(unit, RunKey(job.store_id, receiver), job.user_id)


def _wake(unit: UnitOfWork, key: RunKey, user_id: UserId) -> None:
    run = unit.runs.get(key)
    if run is not None and run.worker_id is not None and run.user_id == user_id:
        unit.wakeups.add([Wakeup(worker_id=run.worker_id, run=run.key)])


def _wake_waiting(unit: UnitOfWork, key: RunKey) -> None:
    """Wake a delegated run that is waiting for the jobs below it."""
    run = unit.runs.get(key) if key.run_id else None
    if run is not None and WaitKind.JOB in run.waits:
        turn.wake(unit, run)


def enter(unit: UnitOfWork, run: RunRow, entered: Iterable[Entered]) -> RunRow:
    """Record that a step of `run` passed these notices to the model. Return the run.

    All users who started or steered these jobs count as having steered the run.
    """
    named = {(each.run_id, each.occasion) for each in entered}
    if not named:
        return run
    conversation = _reported_to(unit, run)
    if conversation is None:
        return run
    background = conversation.background
    waiting = background.pending_of(run.user_id, run.receives_as)
    taken = [each for each in waiting if (each.run_id, each.occasion) in named]
    notices = tuple(replace(each, entered_by=run.run_id) if each in taken else each for each in background.notices)
    unit.put_conversation(replace(conversation, background=replace(background, notices=notices)))
    jobs = (unit.runs.get(RunKey(run.store_id, each.run_id)) for each in taken)
    people = {person for job in jobs if job is not None for person in (*people_of(job), *job.steered_by)}
    return replace(run, steered_by=tuple(sorted({*run.steered_by, *people - people_of(run)})))


def stop_turns(unit: UnitOfWork, run: RunRow) -> None:
    """Stop starting turns under the budget that the turn `run` has used up, until a user sends a message.

    Has no effect if `run` is not a turn or has no budget.
    """
    if not (run.is_turn and run.budget_run_id):
        return
    conversation = unit.conversation_of(run)
    used_up = (*conversation.background.used_up_budgets, run.budget_run_id)
    background = replace(conversation.background, used_up_budgets=used_up)
    unit.put_conversation(replace(conversation, background=background))


def run_ended(unit: UnitOfWork, run: RunRow) -> None:
    """After `run` has ended and left its conversation, remove the notices that it answered.

    Start a turn for the remaining notices.
    """
    conversation = unit.conversation_of(run)
    background = conversation.background
    if not (background.notices or background.used_up_budgets or run.is_turn):
        return
    notices = _after(run, background.notices)
    times = (*background.turn_times[:-1], *_started_at(run)) if run.is_turn else background.turn_times
    used_up = background.used_up_budgets if run.is_turn else ()
    background = replace(background, notices=notices, turn_times=times, used_up_budgets=used_up)
    conversation = replace(conversation, background=background)
    unit.put_conversation(conversation)
    if conversation.active_run_id is not None or not conversation.user_id:
        return
    _start_turn_for(unit, conversation)


def agent_ended(unit: UnitOfWork, run: RunRow) -> tuple[RunId, ...]:
    """Pass on the notices of a delegated run that has ended. Return the open jobs that reported to it."""
    conversation = _reported_to(unit, run) if run.root_conversation_id else None
    if conversation is None:
        return ()
    background = conversation.background
    above = {run_id for each in (*background.notices, *background.open_jobs) for run_id in each.above[:-1]}
    # Runs above may have ended before the job was added, if they did not wait for this run to be cancelled.
    rows = ((run_id, unit.runs.get(RunKey(run.store_id, run_id))) for run_id in above)
    ended = {run_id for run_id, row in rows if row is not None and row.state.is_terminal}
    answered_by = run.run_id if run.state is RunState.COMPLETED else RunId("")
    passed = background.passed_on({run.run_id, *ended}, answered_by)
    if passed == background:
        return ()
    conversation = unit.put_conversation(replace(conversation, background=passed))
    if conversation.active_run_id is not None:
        _wake(unit, RunKey(run.store_id, conversation.active_run_id), run.user_id)
    elif conversation.user_id:
        _start_turn_for(unit, conversation)
    return background.opened_below(run.run_id)


def receiver_of(unit: UnitOfWork, job: RunRow) -> RunId:
    """Return the delegated run whose model receives the notice of the job's end.

    Return an empty id if the conversation receives the notice.
    """
    conversation = unit.conversations.get(ConversationKey(job.store_id, job.reports_to))
    open_jobs = conversation.background.open_jobs if conversation else ()
    return next((each.receiver for each in open_jobs if each.run_id == job.run_id), RunId(""))


def opened_below(unit: UnitOfWork, run: RunRow) -> list[RunRow]:
    """Return the open jobs that report to a delegated run."""
    conversation = _reported_to(unit, run)
    job_ids = conversation.background.opened_below(run.run_id) if conversation else ()
    rows = (unit.runs.get(RunKey(run.store_id, job_id)) for job_id in job_ids)
    return [row for row in rows if row is not None]


class StartTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Start a turn in each idle conversation whose notices were held up because runs were disabled."""

    conversations: tuple[ConversationKey, ...]

    @property
    def row_keys(self) -> RowKeys:
        return RowKeys(conversations=self.conversations)

    def apply(self, unit: UnitOfWork) -> int:
        rows = [row for key in self.conversations if (row := unit.conversations.get(key)) is not None]
        idle = [row for row in rows if row.user_id and row.active_run_id is None]
        for conversation in idle:
            _start_turn_for(unit, conversation)
        return len(idle)


def _start_turn_for(unit: UnitOfWork, conversation: ConversationRow) -> None:
    """Start a turn for the notices that no active run receives, if there are any."""
    notices = (each for each in conversation.background.notices if not each.receiver)
    waiting = (each for each in notices if not each.entered_by or 0 < each.tries < TRIES_MAX)
    jobs = ((each.occasion > 0, unit.runs.get(RunKey(conversation.store_id, each.run_id))) for each in waiting)
    # Job ends come before iterations. Jobs that may not start any more turns are skipped.
    candidates = [(is_iteration, job.generation, job) for is_iteration, job in jobs if job is not None]
    candidates = sorted((each for each in candidates if each[1] < GENERATIONS_MAX), key=lambda each: each[:2])
    for is_iteration, _, job in candidates:
        # If one user has no tokens or turns left, another user's notices still start a turn.
        if _start_turn(unit, conversation, job, PROGRESS_TURNS_MAX if is_iteration else TURNS_MAX):
            return


def has_notices(unit: UnitOfWork, run: RunRow) -> bool:
    conversation = _reported_to(unit, run)
    return conversation is not None and bool(conversation.background.pending_of(run.user_id, run.receives_as))


def need_run(unit: UnitOfWork, run: RunRow) -> bool:
    """Return whether a delegated run that is waiting for the jobs below it must continue now."""
    conversation = _reported_to(unit, run)
    return has_notices(unit, run) or conversation is None or not conversation.background.opened_below(run.receives_as)


def _reported_to(unit: UnitOfWork, run: RunRow) -> ConversationRow | None:
    """Return the conversation that holds the notices for `run`, or None if it was removed."""
    conversation_id = run.root_conversation_id or run.conversation_id
    return unit.conversations.get(ConversationKey(run.store_id, conversation_id))


def has_started(run: RunRow) -> bool:
    return run.last_commit is not None or run.worker_id is not None


def _after(run: RunRow, notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Return the notices that remain once `run` has ended.

    Notices for other users and for delegated runs remain.
    """
    own = [each for each in notices if each.user_id == run.user_id and not each.receiver]
    entered = [each for each in own if each.entered_by]
    if run.state is RunState.COMPLETED:
        return tuple(each for each in notices if each not in entered)
    if run.is_turn and run.state is RunState.CANCELLED and run.stop_cause is StopCause.USER:
        # By stopping the turn, the user dismissed its notices.
        dismissed = entered or own
        return tuple(each for each in notices if each not in dismissed)
    if run.is_turn and run.state is RunState.FAILED:
        return tuple(replace(each, tries=each.tries + 1) if each in entered else each for each in notices)
    return notices


def _started_at(run: RunRow) -> tuple[TurnTime, ...]:
    """Return when a turn actually started, which may be later than planned. The tuple is empty if it never started."""
    return () if run.start_time is None else (TurnTime(user_id=run.user_id, time=run.start_time),)


def _start_turn(unit: UnitOfWork, conversation: ConversationRow, job: RunRow, turns_max: int) -> bool:
    """Start a turn for the notices of a job's user. Return False if the job may not start one now."""
    # The root run's agent reports on jobs below delegated runs. Without the root run, the notice waits for a message.
    is_delegated = len(job.agents_above) > 1
    root = unit.runs.get(RunKey(job.store_id, job.agents_above[-1])) if is_delegated else job
    background, generation = conversation.background, job.generation + 1
    if Feature.RUNS in unit.off(job.store_id):
        return False  # The notice waits for `StartTurns`, the user's next message or a later turn.
    if root is None or turn.budget_below(root) in background.used_up_budgets:
        return False
    recent = tuple(each for each in background.turn_times if each.time > unit.now - TURNS_PERIOD)
    if generation > GENERATIONS_MAX or sum(each.user_id == job.user_id for each in recent) >= turns_max:
        return False
    start = max(unit.now, recent[-1].time + TURN_DISTANCE) if recent else unit.now
    # A clock that was set back must not delay the turn.
    start = min(start, unit.now + TURN_DISTANCE)
    conversation = replace(
        conversation, background=replace(background, turn_times=(*recent, TurnTime(user_id=job.user_id, time=start)))
    )
    run = turn.queued(
        conversation,
        RunId(unit.ids.new("run")),
        b"",
        root.options,
        (root.token_budget - root.topped_up_tokens, root.token_ceiling),
        now=unit.now,
    )
    run = replace(
        run,
        user_id=job.user_id,
        generation=generation,
        budget_run_id=turn.budget_below(root),
        agent_name=root.agent_name,
        credential_id=job.credential_id,
        delegate_user_id=job.delegate_user_id,
        people=job.people,
        steered_by=job.steered_by,
    )
    turn.give(unit, conversation, run, before=(RunChanged(from_state=None, run=run),), claim_at=start)
    return True
