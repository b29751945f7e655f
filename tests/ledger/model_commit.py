"""The reference model of commits by the owner of a run. A commit is atomic and needs the current epoch."""

from __future__ import annotations

from typing import Any

from tests.ledger.model import Model, Refusal, Row
from tests.simulation.checkers import CALL_MOVES, ENDED, NEEDS_START, RUN_MOVES, SETTLED

_WAITS_FOR_PEOPLE = {"AWAITING_APPROVAL", "OFFERED", "ASKED"}
_WITH_CHILD = {"DELEGATED", "DETACHED"}
_MAY_HAVE_ITS_EFFECT = {"OFFERED", "RUNNABLE", "RUNNING", "DELEGATED"}
_ILLEGAL, _CHANGED, _INVALID = "ILLEGAL_TRANSITION", "INBOX_CHANGED", "INVALID_FIELD"


def commit(model: Model, ask: Row) -> tuple[Any, ...]:
    """Return the events of the step and whether commands are pending."""
    run = model.runs.get((ask["store"], ask["run"]))
    if run is None:
        raise Refusal("RUN_NOT_FOUND")
    last = run["last_step"]
    if last is not None and (last["id"], last["epoch"]) == (ask["commit"], ask["epoch"]):
        answer: tuple[Any, ...] = last["answer"]
        return answer
    has_lease = run["epoch"] == ask["epoch"] and run["worker"]
    reasons = _broken((run["state"] in ENDED, "RUN_ENDED"), (not has_lease, "LEASE_LOST"))
    reasons = reasons or _objections(model, run, ask)
    if reasons:
        raise Refusal(*reasons)
    return _write(model, run, ask)


def _broken(*rules: tuple[object, str]) -> set[str]:
    return {reason for is_broken, reason in rules if is_broken}


def _objections(model: Model, run: Row, ask: Row) -> set[str]:
    last, unread = run["last_step"], model.unread(run)
    moved = {call_change["call"] for call_change in ask["calls"]}
    concerns = {unread[name]["call"] for name in ask["consumed"] if name in unread} - {""}
    left = [command for name, command in unread.items() if name not in ask["consumed"]]
    against_calls = [_against_call(model, run, call_change, ask["consumed"]) for call_change in ask["calls"]]
    return (
        _broken(
            (last is not None and last["epoch"] == ask["epoch"] and ask["commit"] < last["id"], _ILLEGAL),
            (ask["after_seq"] is not None and ask["after_seq"] != len(run["log"]), _CHANGED),
            (not set(ask["consumed"]) <= set(unread), _CHANGED),
            (not concerns <= moved, _ILLEGAL),
        )
        | _against_starting(run, ask, left)
        | set().union(*against_calls)
        | _against_delegations(model, run, ask)
        | _against_state(run, ask, left)
        | (_against_end(model, run, ask, left) if ask["state"] in ENDED else set())
    )


def _against_starting(run: Row, ask: Row, left: list[Row]) -> set[str]:
    """I12: a stopping run starts nothing and only moves to its end."""
    if run["state"] != "CANCELLING":
        return set()
    starts = "round.started" in ask["events"] or any(
        call_change["state"] not in SETTLED for call_change in ask["calls"]
    )
    elsewhere = ask["state"] not in {"", "CANCELLING", *(set(RUN_MOVES["CANCELLING"].split()) & ENDED)}
    if not (starts or elsewhere):
        return set()
    # An owner that has not read the stop must read it first. After that, starting anything is its fault.
    return {_CHANGED if any(command["kind"] == "cancel" for command in left) else _ILLEGAL}


def _against_delegations(model: Model, run: Row, ask: Row) -> set[str]:
    """TOOL-7: a step creates exactly one run for each call that it delegates."""
    wanted = {
        call_change["call"]: call_change["child"] for call_change in ask["calls"] if call_change["state"] in _WITH_CHILD
    }
    is_there = any((run["store"], name) in model.runs for name in ask["delegations"].values())
    return _broken((ask["delegations"] != wanted, _INVALID), (is_there, _ILLEGAL))


def _against_child(call: Row | None, call_change: Row) -> set[str]:
    """TOOL-7: a call names its child run from its delegation on, and is settled only after that run has ended."""
    continues = call and call["state"] == "DELEGATED" and not call["reserved"]
    return _broken(
        (call_change["state"] in _WITH_CHILD and not call_change["child"], _INVALID),
        (call_change["state"] not in _WITH_CHILD and call_change["child"] != (call["child"] if call else ""), _ILLEGAL),
        (continues and call_change["state"] != "CANCELLED", _ILLEGAL),
    )


def _against_state(run: Row, ask: Row, left: list[Row]) -> set[str]:
    state = ask["state"]
    may_sleep = bool(left) or (state or run["state"]) in {"WAITING", "NEEDS_ATTENTION"}
    stays = state == run["state"] and state not in ENDED
    return _broken(
        (state and not stays and state not in RUN_MOVES[run["state"]].split(), _ILLEGAL),
        (state == "WAITING" and not ask["waits"], _INVALID),
        (state == "CANCELLING" and not (ask["cause"] or run["cause"]), _INVALID),
        (state not in ENDED and ask["lease"] == "PARK" and ask["wake"] is None and not may_sleep, _INVALID),
    )


def _against_end(model: Model, run: Row, ask: Row, left: list[Row]) -> set[str]:
    wished = {call_change["call"]: call_change["state"] for call_change in ask["calls"]}
    still_open = [call for call in model.open_calls(run) if wished.get(call["id"]) not in SETTLED]
    is_new = [call_change for call_change in ask["calls"] if (run["store"], call_change["call"]) not in model.calls]
    return _broken(
        (ask["state"] == "FAILED" and not ask["failure"], _INVALID),
        (ask["state"] == "CANCELLED" and not (ask["cause"] or run["cause"]), _INVALID),
        # Accepted messages and tokens are not lost.
        (any(command["kind"] in {"steer", "top_up"} for command in left), _CHANGED),
        (still_open or any(call_change["state"] not in SETTLED for call_change in is_new), _ILLEGAL),
        (any(call["reserved"] and call["id"] not in wished for call in still_open), _CHANGED),
    )


def _against_call(model: Model, run: Row, call_change: Row, consumed: list[str]) -> set[str]:
    call = model.calls.get((run["store"], call_change["call"]))
    reasons = _against_child(call, call_change) | _broken(
        ((call_change["state"] in SETTLED) != call_change["has_result"], _INVALID),
        (call_change["state"] == "AWAITING_APPROVAL" and not call_change["digest"], _INVALID),
    )
    if call is None:
        return reasons | _broken(
            (call_change["state"] not in CALL_MOVES[""].split(), _ILLEGAL),
            (call_change["digest"] and call_change["state"] in _MAY_HAVE_ITS_EFFECT, _ILLEGAL),
        )
    if call["run"] != run["id"]:
        return {_INVALID}
    # Only the ledger moves OFFERED to itself, when another client takes the call.
    itself = call_change["state"] == call["state"]
    runs_again = call_change["state"] == "RUNNING" and call_change["attempt"] > call["attempt"]
    may_stay = _may_change_request(call, call_change) if call_change["state"] == "AWAITING_APPROVAL" else runs_again
    is_answered = call["reserved"] or (call["state"] == "ASKED" and (call["default"] or call["begun"]))
    waits = call["state"] in _WAITS_FOR_PEOPLE
    return reasons | _broken(
        (call["reserved"] and call["reserved"] not in consumed, _CHANGED),
        (itself and not may_stay, _ILLEGAL),
        (not itself and call_change["state"] not in CALL_MOVES.get(call["state"], "").split(), _ILLEGAL),
        ((call["state"], call_change["state"]) in NEEDS_START and not call["begun"], _ILLEGAL),
        (call_change["state"] == "SUCCEEDED" and waits and not is_answered, _ILLEGAL),
        (not _passes_the_gate(call, call_change), _ILLEGAL),
    )


def _may_change_request(call: Row, call_change: Row) -> bool:
    """D6: an approval request may change after an edit that needs further approvals, or once by escalation."""
    shown = (call["digest"], call["arguments"])
    if call["decision"] == "EDIT" and call["required"] > 1:
        shown = call["approved"]
    elif call["reserved"] or call["escalated"] or not call_change["escalated"]:
        return False
    return bool(call_change["tool"] == call["tool"] and (call_change["digest"], call_change["arguments"]) == shown)


def _passes_the_gate(call: Row, call_change: Row) -> bool:
    """I9, I10: until a gated call is approved, it equals the call that was shown; then it equals the approved call."""
    if call_change["state"] == "AWAITING_APPROVAL":
        return True  # The call is shown next, and needs its own decision.
    if not call["digest"]:
        return not call_change["digest"]
    falls_back = call_change["tool"] == call["fallback"] != call["tool"] and not call_change["digest"]
    if call["state"] == "OFFERED" and falls_back:
        return True  # Another tool, gated separately.
    approved = call["decision"] in {"APPROVE", "EDIT"}
    others = {user for user, *_ in call["approvers"]} - {call["user"]}
    enough = call["required"] == 1 or len(others) >= call["required"]
    is_early = call_change["state"] in _MAY_HAVE_ITS_EFFECT and not (approved and enough)
    if is_early or call_change["tool"] != call["tool"]:
        return False
    shown, wished = (call["digest"], call["arguments"]), (call_change["digest"], call_change["arguments"])
    if call_change["state"] in SETTLED:
        return wished == shown or (call["decision"] == "EDIT" and wished == call["approved"])
    return bool(wished == (call["approved"] if approved else shown))


def _write(model: Model, run: Row, ask: Row) -> tuple[Any, ...]:
    before = len(run["log"])
    for name in ask["consumed"]:
        run["commands"][name]["unread"] = False
    run["cause"] = run["cause"] or ask["cause"]
    run["unstopped"] = ask["unstopped"] or run["unstopped"]
    if (
        ask["messages"]
        or ask["lease"] == "PARK"
        or any(call_change["state"] in SETTLED for call_change in ask["calls"])
    ):
        run["crashes"] = 0  # The step made progress.
    state, ends = ask["state"], ask["state"] in ENDED
    waits = ask["waits"] if state == "WAITING" else []
    changes = bool(state) and not ends and (state, waits) != (run["state"], run["waits"])
    if changes and state == "RUNNING":
        model.move(run, state)
    run["log"] += [event for event in ask["events"] if event != "round.started"]
    run["log"] += ["message.added"] * ask["messages"]
    run["waiting"] = max(0, run["waiting"] - len(ask["entered"]))
    run["waiting_bytes"] = max(0, run["waiting_bytes"] - sum(ask["entered"]))
    model.conversations[run["store"], run["conversation"]]["messages"] += ask["messages"]
    for call_change in ask["calls"]:
        call = model.calls.get((run["store"], call_change["call"]), {"state": "", "reserved": ""})
        is_cancelled = (call["state"], call_change["state"]) == ("DELEGATED", "CANCELLED") and not call["reserved"]
        _put_call(model, run, call_change)
        if is_cancelled:
            model.give_up(run["store"], call_change["child"])
    for name, child in ask["delegations"].items():
        model.delegate(run, name, child)
    run["log"] += [event for event in ask["events"] if event == "round.started"]
    if changes and state != "RUNNING":
        model.move(run, state, "UNKNOWN_OUTCOME" if state == "NEEDS_ATTENTION" else "")
        run["waits"] = waits
    waiting = bool(model.unread(run)) and not ends
    if ends:
        model.end(run, state)
    elif ask["lease"] != "KEEP":
        run["worker"] = ""
        wake = None if ask["wake"] is None else model.after(ask["wake"])
        run["claim_at"] = model.now if ask["lease"] == "RELEASE" or waiting else wake
    last = len(run["log"])
    answer = ("ok", before + 1 if last > before else 0, last, waiting)
    run["last_step"] = {"id": ask["commit"], "epoch": ask["epoch"], "answer": answer}
    return answer


_CALL_EVENTS = {"RUNNING": "executing", "SUCCEEDED": "completed"}


def _put_call(model: Model, run: Row, call_change: Row) -> None:
    state = call_change["state"]
    nobody: Row = {"client": "", "session": "", "offer_epoch": 0, "held_for": 0.0, "held_until": None}
    untold: Row = {"told": None}
    undecided: Row = {"decision": "", "approved": None, "approvers": [], "approved_before": [], "escalated": False}
    new = {"store": run["store"], "id": call_change["call"], "run": run["id"], "user": run["user"], "state": ""}
    new |= undecided | nobody | untold | {"required": call_change["required"], "begun": False}
    call = model.calls.setdefault((run["store"], call_change["call"]), new)
    if state == "AWAITING_APPROVAL" and call["state"] != state:
        call |= undecided | {"required": call_change["required"]}
    elif state == "AWAITING_APPROVAL" and call["decision"]:
        call |= {"decision": "", "approved": None}
    elif state == "AWAITING_APPROVAL":
        call["escalated"] = True
    call["default"] = call_change["default"]
    call["begun"] = call["begun"] or state == "RUNNING"
    for name in ("state", "tool", "fallback", "arguments", "digest", "attempt", "child"):
        call[name] = call_change[name]
    call["deadline"] = None if call_change["deadline"] is None else model.after(call_change["deadline"])
    call["reserved"] = ""
    if state == "OFFERED":
        call |= nobody | {"offer_epoch": call["offer_epoch"]}
    run["log"].append(f"tool.{_CALL_EVENTS.get(state, state.lower())}")


ASKS = {"commit": commit}
