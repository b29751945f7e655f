"""The reference model of clients and people: leased offers, and commands with receipts."""

from __future__ import annotations

from typing import Any

from tests.ledger.model import Model, Refusal, Row
from tests.simulation.checkers import ENDED, SETTLED

# Offers to clients.


def is_pending(model: Model, call: Row) -> bool:
    """Return whether a call waits for a person.

    In a quarantined run, a running call with an unknown outcome also waits.
    """
    run = model.runs[call["store"], call["run"]]
    if call["reserved"] or run["state"] in ENDED or model.is_stopping(run):
        return False
    if call["state"] == "RUNNING":
        return is_in_doubt(run)
    return call["state"] in {"AWAITING_APPROVAL", "OFFERED", "ASKED"}


def is_in_doubt(run: Row) -> bool:
    return bool(run["attention"] == "UNKNOWN_OUTCOME")


def is_held(model: Model, call: Row) -> bool:
    return bool(call["client"]) and bool(call["held_until"] > model.now)


def _is_over(model: Model, call: Row) -> bool:
    return call["deadline"] is not None and bool(call["deadline"] <= model.now)


def lease_offer(model: Model, ask: Row) -> tuple[Any, ...]:
    """Return whether the client gets the call, and the epoch of its offer."""
    call = model.calls.get((ask["store"], ask["call"]))
    run = model.runs.get((ask["store"], ask["run"]))
    if call is None or run is None or call["run"] != run["id"] or run["user"] != ask["user"]:
        return ("ok", False, 0)
    is_open = call["state"] == "OFFERED" and not _is_over(model, call) and is_pending(model, call)
    is_of_client = call["client"] == ask["client"]
    may_take = is_of_client and ask["session"] >= call["session"]
    if not is_open or (is_held(model, call) and not may_take):
        return ("ok", False, call["offer_epoch"])
    if not is_of_client:
        call["client"] = ask["client"]
        call["offer_epoch"] += 1
        run["log"].append("tool.executing")
    call["session"] = ask["session"]
    call["held_for"] = ask["seconds"]
    call["held_until"] = model.after(ask["seconds"])
    return ("ok", True, call["offer_epoch"])


def renew_offers(model: Model, ask: Row) -> tuple[Any, ...]:
    """Renew and return the calls that the client holds."""
    held = _held_by(model, ask, "")
    for call in held:
        call["held_for"], call["held_until"] = ask["seconds"], model.after(ask["seconds"])
    return ("ok", {call["id"] for call in held})


def release_offers(model: Model, ask: Row) -> tuple[Any, ...]:
    """Release and count the calls that the client holds."""
    return _release(model, _held_by(model, ask, ask["run"]))


def sweep_offers(model: Model, _: Row) -> tuple[Any, ...]:
    """Release and count the calls whose client has vanished."""
    return _release(model, [call for call in _held(model) if not is_held(model, call)])


def _held(model: Model) -> list[Row]:
    held = [call for call in model.calls.values() if call["state"] == "OFFERED" and call["client"]]
    return [call for call in held if not call["reserved"]]


def _held_by(model: Model, ask: Row, run: str) -> list[Row]:
    session = (ask["store"], ask["client"], ask["session"])
    mine = [call for call in _held(model) if (call["store"], call["client"], call["session"]) == session]
    owned = [call for call in mine if model.runs[call["store"], call["run"]]["user"] == ask["user"]]
    return [call for call in owned if run in {"", call["run"]}]


def _release(model: Model, calls: list[Row]) -> tuple[Any, ...]:
    for call in calls:
        call["client"], call["session"], call["held_until"] = "", "", None
        model.runs[call["store"], call["run"]]["log"].append("tool.offered")
    return ("ok", len(calls))


# Commands.

Verdict = tuple[str, str]
# Milliseconds.
_PAUSE = 100
_TAKEN: Verdict = ("ACCEPTED", "")


def send(model: Model, ask: Row) -> tuple[Any, ...]:
    """Return the receipt: outcome and reason."""
    run = model.runs.get((ask["store"], ask["run"]))
    if run is None or not (ask["operator"] or run["user"] == ask["user"] or _approves(model, run, ask)):
        return ("receipt", "UNKNOWN", "RUN_NOT_FOUND")
    earlier = run["commands"].get(ask["command"])
    if earlier is not None:
        if (earlier["fingerprint"], earlier["user"]) != (ask["fingerprint"], ask["user"]):
            raise Refusal("REQUEST_ID_REUSED")
        outcome = "DUPLICATE" if earlier["outcome"] == "ACCEPTED" else earlier["outcome"]
        return ("receipt", outcome, earlier["reason"])
    call = model.calls.get((ask["store"], ask["call"])) if ask["call"] else None
    if call is not None and call["run"] != run["id"]:
        call = None
    outcome, reason = _judge(model, run, call, ask)
    if outcome == "UNKNOWN" or (outcome == "WRONG_HOLDER" and call is not None and _is_replaced(call, ask)):
        return ("receipt", outcome, reason)
    if outcome == "ACCEPTED":
        _judge_room(model, run, ask)
        _accept(model, run, call, ask)
    else:
        more = {"outcome": outcome, "reason": reason, "fingerprint": ask["fingerprint"], "user": ask["user"]}
        model.post_idle(run, ask["command"], ask["kind"], **more)
    return ("receipt", outcome, reason)


def _judge_room(model: Model, run: Row, ask: Row) -> None:
    """Refuse an unsolicited command if too many are pending. It may be sent again later."""
    if ask["kind"] == "steer":
        model.judge_room(run, ask)
        model.enter(run, ask)
    top_ups = [command for command in model.unread(run).values() if command["kind"] == "top_up"]
    if ask["kind"] == "top_up" and len(top_ups) >= model.limits["inbox"]:
        raise Refusal("QUEUE_FULL")


def _approves(model: Model, run: Row, ask: Row) -> bool:
    """D7: in other users' runs, an approver sees only the calls that need an approval."""
    call = model.calls.get((ask["store"], ask["call"]))
    if ask["kind"] != "decide" or ask["right"] != "STORE" or call is None or call["run"] != run["id"]:
        return False
    return bool(call["digest"]) and call["state"] != "ASKED"


def _judge(model: Model, run: Row, call: Row | None, ask: Row) -> Verdict:
    kind = ask["kind"]
    is_over = run["state"] in ENDED or model.is_stopping(run)
    if kind == "decide" and is_over and call is not None and call["decision"]:
        return "LATE", "ALREADY_DECIDED"
    if run["state"] in ENDED:
        return "LATE", "RUN_ENDED"
    if kind in {"cancel", "redrive", "top_up"}:
        return _judge_run(model, run, ask)
    if model.is_stopping(run):
        return "LATE", "CALL_NOT_PENDING"
    if kind == "steer":
        return _TAKEN
    if call is None:
        return "UNKNOWN", "CALL_NOT_FOUND"
    if call["state"] in SETTLED or call["reserved"]:
        return "LATE", "ALREADY_DECIDED" if call["decision"] else "CALL_NOT_PENDING"
    if kind == "decide":
        refused = _judge_decision(call, ask) or _judge_approver(run, call, ask)
        return refused or (("LATE", "DEADLINE_PASSED") if _is_over(model, call) else _TAKEN)
    if kind == "resolve":
        return _TAKEN if is_in_doubt(run) and call["state"] == "RUNNING" else ("REFUSED", "CALL_NOT_PENDING")
    if call["state"] != "OFFERED":
        return "REFUSED", "CALL_NOT_PENDING"
    if kind == "result" and _is_over(model, call):
        return "LATE", "DEADLINE_PASSED"
    is_of_client = _is_of_client(call, ask) and not _is_replaced(call, ask)
    holds = is_of_client if ask["client"] else not is_held(model, call)
    return _TAKEN if holds else ("WRONG_HOLDER", "CALL_NOT_PENDING")


def _is_of_client(call: Row, ask: Row) -> bool:
    return bool(ask["client"]) and (call["client"], call["offer_epoch"]) == (ask["client"], ask["offer_epoch"])


def _is_replaced(call: Row, ask: Row) -> bool:
    return _is_of_client(call, ask) and ask["session"] not in {"", call["session"]}


def _judge_run(model: Model, run: Row, ask: Row) -> Verdict:
    if ask["kind"] == "redrive":
        return _TAKEN if run["attention"] == "QUARANTINED" else ("REFUSED", "ATTENTION_NOT_NEEDED")
    if ask["kind"] == "cancel":
        return _TAKEN
    if model.is_stopping(run):
        return "LATE", "RUN_ENDED"
    if not run["budget"]:
        return "REFUSED", "NO_TOKEN_BUDGET"
    is_over = run["ceiling"] and run["budget"] + ask["tokens"] > run["ceiling"]
    return ("REFUSED", "TOKEN_CEILING") if is_over else _TAKEN


def _judge_decision(call: Row, ask: Row) -> Verdict | None:
    if call["state"] == "ASKED":
        return None if ask["decision"] in {"ANSWER", "REJECT"} else ("REFUSED", "CALL_NOT_PENDING")
    if call["state"] != "AWAITING_APPROVAL":
        return ("LATE", "ALREADY_DECIDED") if call["decision"] else ("REFUSED", "CALL_NOT_PENDING")
    return None


def _judge_approver(run: Row, call: Row, ask: Row) -> Verdict | None:
    """D6: return why the caller may not decide, or None if it may.

    If the call needs several approvals, users who started or steered its run may not decide. No user decides twice, and
    no credential, whichever user it names. The creator of a key counts as acting with it.
    """
    if call["state"] == "ASKED":
        return None
    credential = ask["credential"] if ask["credential"] != "local" else ""
    people = {ask["user"], *ask["people"]}
    moved = {call["user"], *run["people"], *run["steered_by"]}
    started = people & moved or (credential and credential == run["credential"])
    if ask["right"] == "QUESTIONS" or (call["required"] > 1 and started):
        return "REFUSED", "PERMISSION_DENIED"
    if not ask["digest"]:
        return "REFUSED", "DIGEST_REQUIRED"
    if ask["digest"] != call["digest"]:
        return "REFUSED", "DIGEST_MISMATCH"
    if ask["decision"] == "APPROVE" and ask["user"] in [user for user, *_ in call["approvers"]]:
        return "LATE", "ALREADY_DECIDED"
    again = any(
        (credential and credential == used) or people & {user, *others} for user, used, others in call["approvers"]
    )
    return ("REFUSED", "PERMISSION_DENIED") if ask["decision"] == "APPROVE" and again else None


def _counts_only(call: Row | None, ask: Row) -> bool:
    """Return whether a decision is an approval that leaves other approvals missing."""
    if call is None or ask["kind"] != "decide" or (call["state"], ask["decision"]) != ("AWAITING_APPROVAL", "APPROVE"):
        return False
    return len(call["approvers"]) + 1 < int(call["required"])


def _accept(model: Model, run: Row, call: Row | None, ask: Row) -> None:
    kind = ask["kind"]
    if kind == "progress" and call is not None and call["told"] is not None and model.now < call["told"] + _PAUSE:
        # The report comes too soon after the previous one, so it renews the lease but is not forwarded.
        call["held_until"] = model.after(call["held_for"])
        return
    if kind == "cancel" and run["state"] == "CANCELLING":
        model.post_idle(run, ask["command"], kind, fingerprint=ask["fingerprint"], user=ask["user"])
        return
    # If the ledger has applied the command completely, the owner need not read it.
    at_once = kind in {"progress", "redrive"} or _counts_only(call, ask)
    concerns = "" if call is None or at_once else call["id"]
    more = {"unread": not at_once, "call": concerns, "fingerprint": ask["fingerprint"], "user": ask["user"]}
    model.post(run, ask["command"], kind, **more)
    if ask["operator"]:
        run["log"].append("operator.acted")
    if kind == "cancel":
        model.stop(run, "OPERATOR" if ask["operator"] else "USER")
        return
    if kind == "redrive":
        run["crashes"], run["claim_at"] = 0, model.now
        model.move(run, "CANCELLING" if run["cause"] else "QUEUED")
        return
    if kind == "top_up":
        run["budget"] += ask["tokens"]
        run["log"].append("run.topped_up")
    if call is not None:
        _apply_to_call(model, run, call, ask)
    if not at_once or (call is not None and ask["kind"] == "decide"):
        model.wake(run)


def _apply_to_call(model: Model, run: Row, call: Row, ask: Row) -> None:
    if ask["kind"] == "progress":
        call["held_until"], call["told"] = model.after(call["held_for"]), model.now
        run["log"].append("tool.progress")
        return
    if _counts_only(call, ask):
        call["approvers"].append((ask["user"], ask["credential"], ask["people"]))
        run["log"].append("tool.awaiting_approval")
        return
    call["reserved"] = ask["command"]
    if ask["kind"] == "decide" and not (call["state"] == "ASKED" and call["begun"]):
        edits = ask["decision"] == "EDIT"
        if call["state"] == "AWAITING_APPROVAL" and ask["decision"] in {"APPROVE", "EDIT"}:
            call["approved_before"] += call["approvers"] if edits else []
            approver = (ask["user"], ask["credential"], ask["people"])
            call["approvers"] = [approver] if edits else [*call["approvers"], approver]
        call["decision"] = ask["decision"]
        call["approved"] = (ask["edited_digest"], ask["arguments"]) if edits else (call["digest"], call["arguments"])


ASKS = {
    "lease_offer": lease_offer,
    "renew_offers": renew_offers,
    "release_offers": release_offers,
    "sweep_offers": sweep_offers,
    "send": send,
}
