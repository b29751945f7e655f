"""Checkers of the final record. Each yields one description per violation.

Some promises are checked while the simulation runs, under these names: `stale_epochs_change_nothing` (I4),
`durable_before_visible` (I8), `kept_histories_match` (I17), `limits_hold` (LOOP-14), and `one_result_per_call` (I6, by
a strict model provider).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby

from pawl.event.v1 import call_pb2, event_pb2, message_pb2
from pawl.values import EffectClass
from tests.simulation import grants
from tests.simulation.history import Sent
from tests.simulation.record import Ledger, Record, call_state, run_state
from tests.simulation.registry import BACK_END, TOOLS, effect_class

_CALL_ENDS = "SUCCEEDED FAILED EXPIRED CANCELLED"

_RUN_ENDS = "COMPLETED FAILED CANCELLED EXPIRED"

# WAITING and NEEDS_ATTENTION may change to themselves: the reason changes.
RUN_MOVES: dict[str, str] = {
    "": "QUEUED",
    "QUEUED": f"RUNNING WAITING NEEDS_ATTENTION CANCELLING {_RUN_ENDS}",
    "RUNNING": f"WAITING NEEDS_ATTENTION CANCELLING {_RUN_ENDS}",
    "WAITING": "RUNNING WAITING NEEDS_ATTENTION CANCELLING FAILED CANCELLED EXPIRED",
    "NEEDS_ATTENTION": "QUEUED RUNNING WAITING NEEDS_ATTENTION CANCELLING FAILED CANCELLED",
    "CANCELLING": "NEEDS_ATTENTION FAILED CANCELLED",
}

# OFFERED may change to itself (new holder), and so may AWAITING_APPROVAL (further approvals).
CALL_MOVES: dict[str, str] = {
    "": "PROPOSED AWAITING_APPROVAL OFFERED ASKED RUNNABLE RUNNING DELEGATED FAILED REJECTED CANCELLED DETACHED",
    "PROPOSED": "AWAITING_APPROVAL OFFERED ASKED RUNNABLE RUNNING DELEGATED FAILED REJECTED CANCELLED DETACHED",
    "AWAITING_APPROVAL": f"AWAITING_APPROVAL OFFERED RUNNABLE RUNNING DELEGATED REJECTED {_CALL_ENDS}",
    "OFFERED": f"OFFERED AWAITING_APPROVAL ASKED RUNNABLE RUNNING {_CALL_ENDS}",
    "ASKED": f"RUNNABLE RUNNING REJECTED OUTCOME_UNKNOWN {_CALL_ENDS}",
    "RUNNABLE": "RUNNING DELEGATED SUCCEEDED FAILED CANCELLED OUTCOME_UNKNOWN",
    "RUNNING": f"ASKED RUNNABLE RUNNING OUTCOME_UNKNOWN {_CALL_ENDS}",
    "DELEGATED": "SUCCEEDED FAILED CANCELLED",
}

# Calls whose running tool asks a question.
NEEDS_START = {
    ("ASKED", "RUNNABLE"),
    ("ASKED", "RUNNING"),
    ("ASKED", "OUTCOME_UNKNOWN"),
    ("RUNNABLE", "SUCCEEDED"),
    ("RUNNABLE", "OUTCOME_UNKNOWN"),
}

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"})
SETTLED = frozenset({"SUCCEEDED", "FAILED", "REJECTED", "EXPIRED", "CANCELLED", "OUTCOME_UNKNOWN", "DETACHED"})


Checker = Callable[[Record], Iterator[str]]
LedgerChecker = Callable[[Ledger], Iterator[str]]

_ONCE = (EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE)
_REFUSALS_FOR_OTHERS = {"UNKNOWN", "RUN_NOT_FOUND", "CALL_NOT_FOUND", "INVALID_ARGUMENTS", "PERMISSION_DENIED"}


def accepted_messages_are_kept(record: Record) -> Iterator[str]:
    """I1, I2: each accepted message is in its conversation exactly once."""
    for message in record.history.messages:
        if len(set(message.run_ids)) > 1:
            yield f"{message.request_id} made several runs: {sorted(set(message.run_ids))}"
        found = record.texts(message.text)
        if found > 1:
            yield f"{message.request_id} stands {found} times in the conversation"
        if not message.run_ids:
            continue
        run = record.runs.get(message.run_ids[0])
        if run is None:
            yield f"{message.request_id} was accepted, but its run does not exist"
        elif found == 0 and not (not message.steered and run_state(run.state) == "CANCELLED" and run.round == 0):
            yield f"{message.request_id} was accepted but is missing ({run.run_id}, {run_state(run.state)})"


def accepted_commands_take_effect(record: Record) -> Iterator[str]:
    """I1: each accepted command determines the state of its call, unless the run was stopped."""
    for sent in record.history.commands:
        if not sent.taken or not sent.call_id:
            continue
        call = record.calls[sent.call_id]
        state, stopped = call_state(call.state), run_state(record.runs[sent.run_id].state) in {"CANCELLED", "FAILED"}
        if state == "CANCELLED" and (stopped or sent.kind in {"APPROVE", "EDIT"}):
            # Approved, then withdrawn by a user message before the call started.
            continue
        if sent.kind in {"APPROVE", "EDIT"} and call.approval.approvals_required > 1:
            continue  # One of several approvals: the other people may have decided differently.
        content = call.result.content_json
        wrong = {
            "RESULT": state != "SUCCEEDED" or content != sent.content,
            "ANSWER": state != "SUCCEEDED" or sent.content not in content,
            "REJECT": state != "REJECTED",
            "APPROVE": state in {"REJECTED", "EXPIRED"} or call.arguments_json != sent.content,
            "EDIT": state in {"REJECTED", "EXPIRED"} or call.arguments_json != sent.content,
            "HAPPENED": state != "SUCCEEDED" or content != sent.content,
            "TELL_MODEL": state != "FAILED",
            "RUN_AGAIN": False,
        }[sent.kind]
        if wrong:
            yield f"{sent.command_id} {sent.kind} was accepted, but call {sent.call_id} is {state} with {content!r}"


def accepted_cancels_stop_the_run(record: Record) -> Iterator[str]:
    """I1: a run with an accepted cancel ends as CANCELLED or FAILED."""
    for sent in record.history.commands:
        if sent.kind == "CANCEL" and sent.taken:
            state = run_state(record.runs[sent.run_id].state)
            if state not in {"CANCELLED", "FAILED"}:
                yield f"{sent.command_id} was accepted, but run {sent.run_id} is {state}"


def commands_are_accepted_once(record: Record) -> Iterator[str]:
    """I2: each command is accepted at most once."""
    for sent in record.history.commands:
        if sent.outcomes.count("ACCEPTED") > 1:
            yield f"{sent.command_id} was accepted more than once"


def other_users_are_refused(record: Record) -> Iterator[str]:
    """I9, I11: commands of a stranger are refused."""
    for sent in record.history.commands:
        if sent.user_id == "stranger" and not set(sent.outcomes) <= _REFUSALS_FOR_OTHERS:
            yield f"{sent.command_id} of another user got {sent.outcomes}"


def runs_end(record: Record) -> Iterator[str]:
    """I3: every run ends."""
    for row in record.tables.runs.values():
        if not row.state.is_terminal:
            yield f"run {row.run_id} is {row.state.name}, waits {row.waits}, to be claimed at {row.claim_at}"
        elif row.worker_id is not None or row.claim_at is not None:
            yield f"run {row.run_id} has ended but is still claimed"
    for conversation in record.tables.conversations.values():
        if conversation.active_run_id is not None or conversation.queue:
            yield f"conversation {conversation.conversation_id} is still busy"


def effects_happen_once(record: Record) -> Iterator[str]:
    """I5: effects happen at most once if their class requires it, as recorded, and always for successful calls."""
    effects = Counter(effect.call_id for effect in record.history.effects)
    again = Counter(sent.call_id for sent in record.history.commands if sent.taken and sent.kind == "RUN_AGAIN")
    happened = {sent.call_id for sent in record.history.commands if sent.taken and sent.kind == "HAPPENED"}
    for call_id, call in record.calls.items():
        if call.tool_name not in BACK_END or effect_class(call.tool_name) not in _ONCE:
            continue
        state, count = call_state(call.state), effects[call_id]
        if count > 1 + again[call_id]:
            yield f"{call.tool_name} {call_id} had its effect {count} times"
        if state == "SUCCEEDED" and count == 0 and call_id not in happened:
            yield f"{call.tool_name} {call_id} succeeded without an effect"
        if state == "DETACHED" and count:
            yield f"{call.tool_name} {call_id} is detached but had an effect in its own run"
        if state == "REJECTED" and count:
            yield f"{call.tool_name} {call_id} was rejected but had an effect"


def intent_before_effect(record: Record) -> Iterator[str]:
    """I5: the ledger records each call before its effect."""
    begun: dict[str, float] = {}
    for run_id, log in record.logs.items():
        for event in log:
            if event.HasField("call_changed") and call_state(event.call_changed.call.state) == "RUNNING":
                begun.setdefault(event.call_changed.call.call_id, record.written_at(run_id, event.seq))
    for effect in record.history.effects:
        if begun.get(effect.call_id, float("inf")) > effect.time:
            yield f"{effect.tool_name} {effect.call_id} had its effect before the ledger recorded it"


def one_result_per_call(record: Ledger) -> Iterator[str]:
    """I6: no run ends and no round starts while a call has no result."""
    for call_id, call in record.calls.items():
        if call_state(call.state) not in SETTLED or not call.HasField("result"):
            yield f"call {call_id} is {call_state(call.state)}, with a result: {call.HasField('result')}"
    for run_id, log in record.logs.items():
        open_calls: set[str] = set()
        for event in log:
            if event.HasField("call_changed"):
                call = event.call_changed.call
                (open_calls.discard if call_state(call.state) in SETTLED else open_calls.add)(call.call_id)
            if event.HasField("round_started") and open_calls:
                yield f"run {run_id} started a round at seq {event.seq} with open calls"


def seqs_without_gaps(record: Record) -> Iterator[str]:
    """I7: each run has one log, which every watcher sees."""
    for run_id, log in record.logs.items():
        if [event.seq for event in log] != list(range(1, len(log) + 1)):
            yield f"the log of {run_id} has gaps"
        if record.runs[run_id].last_seq != len(log):
            yield f"run {run_id} has a log that ends at {record.runs[run_id].last_seq}, not {len(log)}"
    logs = {str(key.run_id): log for key, log in record.tables.events.items()}
    stored = {(run_id, seq): data for run_id, log in logs.items() for seq, data in enumerate(log, 1)}
    for seen in record.history.seen:
        if stored.get((seen.run_id, seen.seq)) != seen.payload:
            yield f"{seen.watcher} saw another seq {seen.seq} of {seen.run_id} than the log has"


def gated_calls_run_as_approved(record: Record) -> Iterator[str]:
    """I9, I10, D6: a gated effect has enough approvals of exactly these arguments, or a valid grant for its series.

    If several approvals are required, none is from the user of the run.
    """
    said: dict[str, list[Sent]] = defaultdict(list)
    given = grants.grants(record)
    for sent in record.history.commands:
        said[sent.call_id].append(sent)
    for effect in record.history.effects:
        if TOOLS[effect.tool_name].disposition != "APPROVE":
            continue
        words = [sent for sent in said[effect.call_id] if sent.user_id != "stranger"]
        if grants.of_effect(given, record, effect) is not None:
            continue
        people = {
            sent.user_id for sent in words if sent.kind in {"APPROVE", "EDIT"} and sent.content == effect.arguments_json
        }
        required = record.calls[effect.call_id].approval.approvals_required
        if len(people if required == 1 else people - {effect.user_id}) < required:
            yield f"{effect.tool_name} {effect.call_id} happened, approved by {sorted(people)} of {required}"
        if any(sent.kind == "REJECT" and sent.taken for sent in words):
            yield f"{effect.tool_name} {effect.call_id} had its effect although it was rejected"


def decisions_are_audited(record: Record) -> Iterator[str]:
    """TOOL-6: the audit chain names who decided about a call or sent its result."""
    for sent in record.history.commands:
        if not sent.taken or sent.kind not in {"APPROVE", "EDIT", "REJECT", "RESULT"}:
            continue
        is_audited = sent.kind == "RESULT" or bool(record.calls[sent.call_id].approval.digest)
        said = "SUCCEEDED" if sent.kind == "RESULT" else sent.kind
        if is_audited and (sent.call_id, said, sent.user_id) not in record.history.decided:
            yield f"{sent.user_id} sent {sent.kind} about {sent.call_id}, which is missing from the audit chain"


def held_calls_are_audited(record: Record) -> Iterator[str]:
    """TOOL-6: the audit chain has each front-end call that ended while a client held it, unless its run ended too."""
    for call in record.calls.values():
        run, state = record.runs[call.run_id], call_state(call.state)
        if run_state(run.state) != "COMPLETED" or call.HasField("question") or not call.HasField("start_time"):
            continue
        is_given_up = call.context == call_pb2.EXECUTION_CONTEXT_FRONTEND and state in {"EXPIRED", "CANCELLED"}
        if is_given_up and (call.call_id, state, run.user_id) not in record.history.decided:
            yield f"{call.call_id} {state} while a client held it, which is missing from the audit chain"


def only_reads_run_before_they_are_recorded(record: Record) -> Iterator[str]:
    """I5: a call that was first recorded with its end is read-only and needed no approval."""
    for run_id, log in record.logs.items():
        begun: dict[str, float] = {}
        for event in log:
            if not event.HasField("call_changed"):
                continue
            call, time = event.call_changed.call, record.written_at(run_id, event.seq)
            if call_state(call.state) == "RUNNING":
                begun[call.call_id] = time
            elif begun.get(call.call_id) == time and effect_class(call.tool_name) is not EffectClass.READ_ONLY:
                yield f"{call.tool_name} {call.call_id} ran before the ledger recorded it"


def one_front_end_result(record: Record) -> Iterator[str]:
    """I11: each front-end call accepts one result."""
    taken: dict[str, set[str]] = defaultdict(set)
    for sent in record.history.commands:
        if sent.kind == "RESULT" and sent.taken:
            taken[sent.call_id].add(sent.command_id)
    for call_id, commands in taken.items():
        if len(commands) > 1:
            yield f"call {call_id} took {len(commands)} results"


def nothing_starts_after_a_cancel(record: Ledger) -> Iterator[str]:
    """I12: no call starts after a stop. A read-only call may, until its worker learns of the stop."""
    for run_id, log in record.logs.items():
        cancelled = False
        for event, next_event in zip(log, [*log[1:], None], strict=True):
            if event.HasField("run_changed"):
                cancelled = cancelled or run_state(event.run_changed.run.state) == "CANCELLING"
            elif cancelled and event.HasField("round_started"):
                yield f"run {run_id} started a round at seq {event.seq}after it was stopped"
            elif cancelled and event.HasField("call_changed"):
                call, before = event.call_changed.call, call_state(event.call_changed.from_state)
                state = call_state(call.state)
                given_back = state == before == "OFFERED" and not call.offer.client_id
                if state not in SETTLED and not given_back and not _is_read_to_its_end(event, next_event):
                    yield f"call {call.call_id} became {state} after its run was stopped"


def _is_read_to_its_end(event: event_pb2.RunEvent, next_event: event_pb2.RunEvent | None) -> bool:
    """Return whether a read-only call became RUNNING and ended in one step."""
    began = event.call_changed.call
    if next_event is None or not next_event.HasField("call_changed"):
        return False
    ended = next_event.call_changed.call
    is_read = began.effect_class == call_pb2.EFFECT_CLASS_READ_ONLY and call_state(began.state) == "RUNNING"
    return is_read and ended.call_id == began.call_id and call_state(ended.state) in SETTLED


def state_changes_are_allowed(record: Ledger) -> Iterator[str]:
    """I16: states change only as the transition tables in `reference` allow."""
    for run_id, log in record.logs.items():
        at = ""
        calls: dict[str, str] = defaultdict(str)
        for event in log:
            if event.HasField("run_changed"):
                state = run_state(event.run_changed.run.state)
                if state not in RUN_MOVES.get(at, "").split() or run_state(event.run_changed.from_state) != at:
                    yield f"run {run_id} went from {at or 'nothing'} to {state}"
                at = state
            if event.HasField("call_changed"):
                call = event.call_changed.call
                state, before = call_state(call.state), calls[call.call_id]
                if state not in CALL_MOVES.get(before, "").split():
                    yield f"call {call.call_id} went from {before or 'nothing'} to {state}"
                calls[call.call_id] = state
        if log and at in ENDED and not log[-1].HasField("run_changed"):
            yield f"the log of {run_id} continues after its end"


def state_is_the_fold_of_the_log(record: Ledger) -> Iterator[str]:
    """I17: the state in the tables equals the fold of the log."""
    for run_id, log in record.logs.items():
        run = next(event.run_changed.run for event in reversed(log) if event.HasField("run_changed"))
        row = record.runs[run_id]
        for name in ("state", "waits", "stop_cause", "failure", "output_text", "usage"):
            if getattr(run, name) != getattr(row, name):
                yield f"run {run_id}: the log has {name} {getattr(run, name)!r}, the row {getattr(row, name)!r}"
        last = {
            event.call_changed.call.call_id: event.call_changed.call for event in log if event.HasField("call_changed")
        }
        rows = {call_id for call_id, call in record.calls.items() if call.run_id == run_id}
        if set(last) != rows:
            yield f"run {run_id}: calls differ between log and table"
        for call_id, call in last.items():
            for name in ("state", "arguments_json", "attempt", "result", "approval"):
                if call_id in rows and getattr(call, name) != getattr(record.calls[call_id], name):
                    yield f"call {call_id}: log and table differ in {name}"
    for conversation, kept in record.messages.items():
        said = [
            event.message_added.message
            for log in record.logs.values()
            for event in log
            if event.HasField("message_added") and event.conversation_id == conversation
        ]
        if sorted(said, key=lambda message: message.number) != kept:
            yield f"conversation {conversation}: messages differ between logs and table"
        if [message.number for message in kept] != list(range(1, len(kept) + 1)):
            yield f"conversation {conversation}: message numbers have gaps"


def streamed_output_matches_the_message(record: Ledger) -> Iterator[str]:
    """LOOP-6: the streamed output of a round equals its stored message."""
    for conversation in record.messages.values():
        for message in conversation:
            if message.role != message_pb2.ROLE_ASSISTANT:
                continue
            if message.interrupted and not message.first_output_seq:
                continue  # The output of this attempt is void.
            run = record.runs[message.run_id]
            if run.HasField("goal") or run.HasField("undo"):
                continue  # No model writes the report of a goal or undo.
            if message.text != _shown(record, message):
                shown = _shown(record, message)
                yield f"message {message.number} of {message.run_id} is {message.text!r}, and {shown!r} was shown"


def _shown(record: Ledger, message: message_pb2.Message) -> str:
    if not message.first_output_seq:
        return ""
    part = record.logs[message.run_id][message.first_output_seq - 1 : message.last_output_seq]
    return "".join(event.output_delta.text for event in part if event.HasField("output_delta"))


def rounds_start_in_order(record: Ledger) -> Iterator[str]:
    """LOOP-2: rounds and their attempts are numbered without gaps, and each starts once."""
    for run_id, log in record.logs.items():
        begun = [_round(event) for event in log if event.HasField("round_started")]
        if begun != sorted(set(begun)):
            yield f"run {run_id} started rounds {begun}"
        rounds = [number for number, _ in groupby(begun, key=lambda pair: pair[0])]
        if rounds != list(range(1, len(rounds) + 1)):
            yield f"run {run_id} skipped a round: {rounds}"


def failed_models_are_not_used_again(record: Ledger) -> Iterator[str]:
    """LOOP-7: a run switches to the next model after a permanent failure and never switches back."""
    for run_id, log in record.logs.items():
        options = record.runs[run_id].options
        order = (options.model, *options.model_fallbacks)
        asked = [
            order.index(model) for event in log if (model := event.round_started.model or event.round_retrying.model)
        ]
        if asked != sorted(asked):
            yield f"run {run_id} returned to a failed model: {[order[position] for position in asked]}"


def _round(event: event_pb2.RunEvent) -> tuple[int, int]:
    return event.round_started.round, event.round_started.model_attempt


# Checkers that only need the ledger.
LEDGER_CHECKERS: tuple[LedgerChecker, ...] = (
    one_result_per_call,
    nothing_starts_after_a_cancel,
    state_changes_are_allowed,
    state_is_the_fold_of_the_log,
    streamed_output_matches_the_message,
    rounds_start_in_order,
    failed_models_are_not_used_again,
)

CHECKERS: tuple[Checker, ...] = (
    accepted_messages_are_kept,
    accepted_commands_take_effect,
    accepted_cancels_stop_the_run,
    commands_are_accepted_once,
    other_users_are_refused,
    runs_end,
    effects_happen_once,
    intent_before_effect,
    only_reads_run_before_they_are_recorded,
    seqs_without_gaps,
    gated_calls_run_as_approved,
    decisions_are_audited,
    held_calls_are_audited,
    one_front_end_result,
    *LEDGER_CHECKERS,
)
