"""Checkers of the final record. Each yields one description per violation.

Some promises are checked while the simulation runs, under these names: `stale_epochs_change_nothing` (I4),
`durable_before_visible` (I8), `kept_histories_match` (I17), `limits_hold` (LOOP-14), and `one_result_per_call` (I6, by
a strict model provider).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest

from pawl.event.v1 import call_pb2, event_pb2, message_pb2
from pawl.values import EffectClass
from tests.simulation import grants
from tests.simulation.record import Ledger, Record, broken, call_changes, call_state, run_state
from tests.simulation.registry import BACK_END, OWN, TOOLS, effect_class

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
        found, run_ids = record.texts(message.text), message.run_ids
        run = record.runs.get(run_ids[0]) if run_ids else None
        is_void = run is not None and (message.steered, run_state(run.state), run.round) == (False, "CANCELLED", 0)
        yield from broken(
            (len(set(run_ids)) > 1, f"{message.request_id} made several runs: {sorted(set(run_ids))}"),
            (found > 1, f"{message.request_id} stands {found} times in the conversation"),
            (run_ids and run is None, f"{message.request_id} was accepted, but its run does not exist"),
            (
                run is not None and not found and not is_void,
                f"{message.request_id} was accepted but is missing ({run_ids})",
            ),
        )


def accepted_commands_take_effect(record: Record) -> Iterator[str]:
    """I1: each accepted command determines the state of its call, unless the run was stopped."""
    for sent in (each for each in record.history.commands if each.taken and each.call_id):
        call, approves = record.calls[sent.call_id], sent.kind in {"APPROVE", "EDIT"}
        state, stopped = call_state(call.state), run_state(record.runs[sent.run_id].state) in {"CANCELLED", "FAILED"}
        # An approved call may be withdrawn by a user message before it starts.
        withdrawn = state == "CANCELLED" and (stopped or approves)
        # One of several approvals: the other people may have decided differently.
        is_one_of_several = approves and call.approval.approvals_required > 1
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
        }
        if wrong[sent.kind] and not (withdrawn or is_one_of_several):
            yield f"{sent.command_id} {sent.kind} was accepted, but call {sent.call_id} is {state} with {content!r}"


def accepted_cancels_stop_the_run(record: Record) -> Iterator[str]:
    """I1: a run with an accepted cancel ends as CANCELLED or FAILED."""
    stopped = ((sent, run_state(record.runs[sent.run_id].state)) for sent in record.taken("CANCEL"))
    return (
        f"{sent.command_id} was accepted, but run {sent.run_id} is {state}"
        for sent, state in stopped
        if state not in {"CANCELLED", "FAILED"}
    )


def commands_are_accepted_once(record: Record) -> Iterator[str]:
    """I2: each command is accepted at most once."""
    return (
        f"{sent.command_id} was accepted more than once"
        for sent in record.history.commands
        if sent.outcomes.count("ACCEPTED") > 1
    )


def other_users_are_refused(record: Record) -> Iterator[str]:
    """I9, I11: commands of another user are refused."""
    return (
        f"{sent.command_id} of another user got {sent.outcomes}"
        for sent in record.history.commands
        if sent.user_id == "stranger" and not set(sent.outcomes) <= _REFUSALS_FOR_OTHERS
    )


def runs_end(record: Record) -> Iterator[str]:
    """I3: every run ends."""
    for row in record.tables.runs.values():
        if not row.state.is_terminal:
            yield f"run {row.run_id} is {row.state.name}, waits {row.waits}, to be claimed at {row.claim_at}"
        elif row.worker_id is not None or row.claim_at is not None:
            yield f"run {row.run_id} has ended but is still claimed"
    yield from (
        f"conversation {conversation.conversation_id} is still busy"
        for conversation in record.tables.conversations.values()
        if conversation.active_run_id is not None or conversation.queue
    )


def effects_happen_once(record: Record) -> Iterator[str]:
    """I5: effects happen at most once if their class requires it, as recorded, and always for successful calls."""
    effects = Counter(effect.call_id for effect in record.history.effects)
    again = Counter(sent.call_id for sent in record.taken("RUN_AGAIN"))
    happened = {sent.call_id for sent in record.taken("HAPPENED")}
    for call_id, call in record.calls.items():
        state, count, what = call_state(call.state), effects[call_id], f"{call.tool_name} {call_id}"
        if call.tool_name in BACK_END and effect_class(call.tool_name) in _ONCE:
            yield from broken(
                (count > 1 + again[call_id], f"{what} had its effect {count} times"),
                (state == "SUCCEEDED" and not count and call_id not in happened, f"{what} succeeded without an effect"),
                (state == "DETACHED" and count, f"{what} is detached but had an effect in its own run"),
                (state == "REJECTED" and count, f"{what} was rejected but had an effect"),
            )


def intent_before_effect(record: Record) -> Iterator[str]:
    """I5: the ledger records each call before its effect."""
    begun: dict[str, float] = {}
    for run_id, log in record.logs.items():
        for event, call in call_changes(log):
            if call_state(call.state) == "RUNNING":
                begun.setdefault(call.call_id, record.written_at(run_id, event.seq))
    return (
        f"{effect.tool_name} {effect.call_id} had its effect before the ledger recorded it"
        for effect in record.history.effects
        if begun.get(effect.call_id, float("inf")) > effect.time
    )


def one_result_per_call(record: Ledger) -> Iterator[str]:
    """I6: no run ends and no round starts while a call has no result."""
    yield from (
        f"call {call_id} is {call_state(call.state)}, with a result: {call.HasField('result')}"
        for call_id, call in record.calls.items()
        if call_state(call.state) not in SETTLED or not call.HasField("result")
    )
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
        last_seq = record.runs[run_id].last_seq
        yield from broken(
            ([event.seq for event in log] != list(range(1, len(log) + 1)), f"the log of {run_id} has gaps"),
            (last_seq != len(log), f"run {run_id} has a log that ends at {last_seq}, not {len(log)}"),
        )
    logs = {str(key.run_id): log for key, log in record.tables.events.items()}
    stored = {(run_id, seq): data for run_id, log in logs.items() for seq, data in enumerate(log, 1)}
    yield from (
        f"{seen.watcher} saw another seq {seen.seq} of {seen.run_id} than the log has"
        for seen in record.history.seen
        if stored.get((seen.run_id, seen.seq)) != seen.payload
    )


def gated_calls_run_as_approved(record: Record) -> Iterator[str]:
    """I9, I10, D6: a gated effect has enough approvals of exactly these arguments, or a valid grant for its series.

    If several approvals are required, none is from the user of the run.
    """
    given, said = grants.grants(record), grants.commands_by_call(record)
    for effect in (each for each in record.history.effects if TOOLS[each.tool_name].disposition == "APPROVE"):
        words = [sent for sent in said[effect.call_id] if sent.user_id != "stranger"]
        approving = (sent for sent in words if sent.kind in {"APPROVE", "EDIT"})
        people = {sent.user_id for sent in approving if sent.content == effect.arguments_json}
        required = record.calls[effect.call_id].approval.approvals_required
        is_missing = len(people if required == 1 else people - {effect.user_id}) < required
        is_rejected = any(sent.kind == "REJECT" and sent.taken for sent in words)
        what = f"{effect.tool_name} {effect.call_id}"
        if grants.of_effect(given, record, effect) is None:
            yield from broken(
                (is_missing, f"{what} happened, approved by {sorted(people)} of {required}"),
                (is_rejected, f"{what} had its effect although it was rejected"),
            )


def decisions_are_audited(record: Record) -> Iterator[str]:
    """TOOL-6: the audit chain names who decided about a call or sent its result."""
    for sent in record.taken("APPROVE", "EDIT", "REJECT", "RESULT"):
        is_audited = sent.kind == "RESULT" or bool(record.calls[sent.call_id].approval.digest)
        said = "SUCCEEDED" if sent.kind == "RESULT" else sent.kind
        if is_audited and (sent.call_id, said, sent.user_id) not in record.history.decided:
            yield f"{sent.user_id} sent {sent.kind} about {sent.call_id}, which is missing from the audit chain"


def held_calls_are_audited(record: Record) -> Iterator[str]:
    """TOOL-6: the audit chain has each front-end call that ended while a client held it, unless its run ended too."""
    for call in record.calls.values():
        run, state = record.runs[call.run_id], call_state(call.state)
        was_held = call.context == call_pb2.EXECUTION_CONTEXT_FRONTEND and call.HasField("start_time")
        is_given_up = was_held and not call.HasField("question") and state in {"EXPIRED", "CANCELLED"}
        is_audited = (call.call_id, state, run.user_id) in record.history.decided
        if is_given_up and run_state(run.state) == "COMPLETED" and not is_audited:
            yield f"{call.call_id} {state} while a client held it, which is missing from the audit chain"


def only_reads_run_before_they_are_recorded(record: Record) -> Iterator[str]:
    """I5: a call that was first recorded with its end is read-only and needed no approval."""
    for run_id, log in record.logs.items():
        begun: dict[str, float] = {}
        for event, call in call_changes(log):
            time = record.written_at(run_id, event.seq)
            if call_state(call.state) == "RUNNING":
                begun[call.call_id] = time
            elif begun.get(call.call_id) == time and effect_class(call.tool_name) is not EffectClass.READ_ONLY:
                yield f"{call.tool_name} {call.call_id} ran before the ledger recorded it"


def one_front_end_result(record: Record) -> Iterator[str]:
    """I11: each front-end call accepts one result."""
    taken = {(sent.call_id, sent.command_id) for sent in record.taken("RESULT")}
    results = Counter(call_id for call_id, _ in taken)
    return (f"call {call_id} took {count} results" for call_id, count in results.items() if count > 1)


def nothing_starts_after_a_cancel(record: Ledger) -> Iterator[str]:
    """I12: no call starts after a stop. A read-only call may, until its worker learns of the stop."""
    for run_id, log in record.logs.items():
        states = [run_state(event.run_changed.run.state) for event in log]
        stop = states.index("CANCELLING") if "CANCELLING" in states else len(log)
        for event, next_event in zip_longest(log[stop:], log[stop + 1 :]):
            call, before = event.call_changed.call, call_state(event.call_changed.from_state)
            state = call_state(call.state)
            given_back = state == before == "OFFERED" and not call.offer.client_id
            may = state in SETTLED or given_back or _is_read_to_its_end(event, next_event)
            yield from broken(
                (event.HasField("round_started"), f"run {run_id} started a round at seq {event.seq} after its stop"),
                (state and not may, f"call {call.call_id} became {state} after its run was stopped"),
            )


def _is_read_to_its_end(event: event_pb2.RunEvent, next_event: event_pb2.RunEvent | None) -> bool:
    """Return whether a read-only call became RUNNING and ended in one step."""
    began, ended = event.call_changed.call, (next_event or event).call_changed.call
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
        row, last = record.runs[run_id], {call.call_id: call for _, call in call_changes(log)}
        rows = {call_id: call for call_id, call in record.calls.items() if call.run_id == run_id}
        yield from (
            f"run {run_id}: the log has {name} {getattr(run, name)!r}, the row {getattr(row, name)!r}"
            for name in ("state", "waits", "stop_cause", "failure", "output_text", "usage")
            if getattr(run, name) != getattr(row, name)
        )
        yield from broken((set(last) != set(rows), f"run {run_id}: calls differ between log and table"))
        yield from (
            f"call {call_id}: log and table differ in {name}"
            for call_id, call in last.items()
            for name in ("state", "arguments_json", "attempt", "result", "approval")
            if call_id in rows and getattr(call, name) != getattr(rows[call_id], name)
        )
    said: dict[str, list[message_pb2.Message]] = defaultdict(list)
    for event in (event for log in record.logs.values() for event in log if event.HasField("message_added")):
        said[event.conversation_id].append(event.message_added.message)
    for name, kept in record.messages.items():
        in_logs = sorted(said[name], key=lambda message: message.number)
        numbers = [message.number for message in kept]
        yield from broken(
            (in_logs != kept, f"conversation {name}: messages differ between logs and table"),
            (numbers != list(range(1, len(kept) + 1)), f"conversation {name}: message numbers have gaps"),
        )


def streamed_output_matches_the_message(record: Ledger) -> Iterator[str]:
    """LOOP-6: the streamed output of a round equals its stored message."""
    for message in (message for conversation in record.messages.values() for message in conversation):
        # The output of an interrupted attempt may be void. No model writes the report of a goal or undo.
        is_void = message.interrupted and not message.first_output_seq
        run = record.runs.get(message.run_id)
        is_report = run is not None and (run.HasField("goal") or run.HasField("undo"))
        is_streamed = message.role == message_pb2.ROLE_ASSISTANT and not (is_void or is_report)
        if is_streamed and message.text != (shown := _shown(record, message)):
            yield f"message {message.number} of {message.run_id} is {message.text!r}, and {shown!r} was shown"


def _shown(record: Ledger, message: message_pb2.Message) -> str:
    if not message.first_output_seq:
        return ""
    part = record.logs[message.run_id][message.first_output_seq - 1 : message.last_output_seq]
    return "".join(event.output_delta.text for event in part if event.HasField("output_delta"))


def rounds_start_in_order(record: Ledger) -> Iterator[str]:
    """LOOP-2: rounds and their attempts are numbered without gaps, and each starts once."""
    for run_id, log in record.logs.items():
        starts = (event.round_started for event in log if event.HasField("round_started"))
        begun = [(start.round, start.model_attempt) for start in starts]
        rounds = [number for number, _ in groupby(begun, key=lambda pair: pair[0])]
        yield from broken(
            (begun != sorted(set(begun)), f"run {run_id} started rounds {begun}"),
            (rounds != list(range(1, len(rounds) + 1)), f"run {run_id} skipped a round: {rounds}"),
        )


def failed_models_are_not_used_again(record: Ledger) -> Iterator[str]:
    """LOOP-7: a run switches to the next model after a permanent failure and never switches back."""
    for run_id, log in record.logs.items():
        order = (record.runs[run_id].options.model, *record.runs[run_id].options.model_fallbacks)
        models = (event.round_started.model or event.round_retrying.model for event in log)
        asked = [order.index(model) for model in models if model]
        if asked != sorted(asked):
            yield f"run {run_id} returned to a failed model: {[order[position] for position in asked]}"


def own_tools_stay_with_their_run(record: Record) -> Iterator[str]:
    """FE-2: a run keeps the tools that came with it, even after crashes, and no other run has them."""
    for message in record.history.messages:
        run = record.runs.get(message.run_ids[0]) if message.run_ids and not message.steered else None
        if run is not None and list(run.own_tools.names) != [OWN] * message.tool_count:
            yield f"{message.request_id} has {message.tool_count} tools, its run {run.run_id} {run.own_tools.names}"
    for run_id, run in record.runs.items():
        pinned = [tool.name for tool in run.tools if tool.definition_sha256]
        if run.tools and pinned != list(run.own_tools.names):
            yield f"run {run_id} came with {list(run.own_tools.names)} and pinned {pinned}"
    yield from (
        f"call {call.call_id} of a tool that came with its run was not found"
        for call in record.calls.values()
        if (call.tool_name, call.result.error_reason) == (OWN, "TOOL_NOT_FOUND")
        and record.runs[call.run_id].own_tools.names
    )


def own_calls_stay_with_their_client(record: Record) -> Iterator[str]:
    """FE-2: calls of a tool that belongs to a client are offered only to that client."""
    for run_id, log in record.logs.items():
        client_id = record.runs[run_id].own_tools.client_id
        offers = (call for _, call in call_changes(log) if call.tool_name == OWN and call.offer.client_id)
        yield from (
            f"call {call.call_id} went to {call.offer.client_id}"
            for call in offers
            if client_id and call.offer.client_id != client_id
        )


def time_limits_use_real_time(record: Record) -> Iterator[str]:
    """LOOP-9: no run fails by a time limit before that time has really passed, even if the database clock jumps."""
    for run_id, run in record.runs.items():
        limits, log, reason = run.options.limits, record.logs[run_id], run.failure.reason
        most = {"RUN_TIMEOUT": limits.run_timeout_seconds, "ROUND_TIMEOUT": limits.round_timeout_seconds}
        if reason in most:
            begins = [event.seq for event in log if event.HasField("round_started")]
            since = max(begins, default=1) if reason == "ROUND_TIMEOUT" else 1
            took = record.written_at(run_id, len(log)) - record.written_at(run_id, since)
            yield from broken((took < most[reason], f"run {run_id} failed with {reason} after {took:.1f} s"))


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
    own_tools_stay_with_their_run,
    own_calls_stay_with_their_client,
    time_limits_use_real_time,
    *LEDGER_CHECKERS,
)
