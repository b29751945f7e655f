"""Translates asks into operations of the product."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pawl.chassis.ids import CallKey, RequestId, RunKey
from pawl.event.v1 import run_pb2
from pawl.job_store.ledger.rules import inbox
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import (
    Cancel,
    Command,
    Progress,
    Redrive,
    Resolve,
    Send,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.job_store.ledger.rules.commit import Commit, NewMessage
from pawl.job_store.ledger.rules.conversations import UpdateConversation
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.job_store.ledger.rules.delegation import Delegation
from pawl.job_store.ledger.rules.events import OwnerEvent
from pawl.job_store.ledger.rules.offers import LeaseOffer
from pawl.job_store.ledger.rules.states import Sharing
from pawl.job_store.ledger.rules.submit import Submit
from pawl.values import CallState, DecisionKind, DecisionRight, LeaseAction, MessagePolicy, RunState, StopCause
from tests.ledger.commands import CALLS
from tests.ledger.model import Row
from tests.simulation.checkers import ENDED
from tests.unit.job_store.world import change, submission

_FAILURE = run_pb2.Run(failure=run_pb2.RunFailure(message="It failed.")).SerializeToString()


def operation(ask: Row, now: datetime) -> Any:
    """Return the operation of an ask, or None if it is not an operation of the group commit."""
    match ask["do"]:
        case "submit":
            return _submit(ask)
        case "share":
            return UpdateConversation(
                store_id=ask["store"],
                user_id=ask["user"],
                request_id=RequestId(""),
                fingerprint=b"",
                conversation_id=ask["conversation"],
                sharing=Sharing[ask["sharing"]],
            )
        case "commit":
            return _commit(ask, now)
        case "send":
            return Send(
                run=RunKey(ask["store"], ask["run"]),
                user_id=ask["user"],
                command_id=ask["command"],
                fingerprint=ask["fingerprint"].encode(),
                command=_command(ask),
                payload=b"payload",
                as_operator=ask["operator"],
                session_id=ask.get("session", ""),
                credential_id=ask.get("credential", ""),
                people=ask.get("people", ()),
                inbox_limits=_inbox_limits(ask["limits"]),
            )
        case "report_crash":
            return ReportCrash(
                run=RunKey(ask["store"], ask["run"]),
                epoch=ask["epoch"],
                crashes_max=ask["limits"]["crashes"],
            )
        case "lease_offer":
            return LeaseOffer(
                run=RunKey(ask["store"], ask["run"]),
                call=CallKey(ask["store"], ask["call"]),
                user_id=ask["user"],
                client_id=ask["client"],
                session_id=ask["session"],
                lease_seconds=ask["seconds"],
            )
        case _:
            return None


def _submit(ask: Row) -> Submit:
    return submission(
        MessagePolicy[ask["policy"]],
        store_id=ask["store"],
        user_id=ask["user"],
        request_id=ask["request"],
        fingerprint=ask["fingerprint"].encode(),
        conversation_id=ask["conversation"],
        conversation_must_exist=ask["must_exist"],
        message=b"",
        steer=b"",
        interrupt=b"",
        queue_max=ask["limits"]["queue"],
        store_queue_max=ask["limits"]["store_queue"],
        store_slots=ask["limits"]["per_store"],
        token_budget=ask["budget"],
        token_ceiling=ask["ceiling"],
        text_bytes=ask["bytes"],
        credential_id=ask["credential"],
        people=ask["people"],
        inbox_limits=_inbox_limits(ask["limits"]),
    )


def _inbox_limits(limits: Row) -> inbox.Limits:
    return inbox.Limits(
        commands_max=limits["inbox"],
        bytes_max=limits["inbox_bytes"],
        idle_receipts_max=limits["receipts"],
        people_max=limits["people"],
    )


def _commit(ask: Row, now: datetime) -> Commit:
    return Commit(
        run=RunKey(ask["store"], ask["run"]),
        epoch=ask["epoch"],
        commit_id=ask["commit"],
        events=tuple(OwnerEvent(type=kind, body=b"") for kind in ask["events"]),
        messages=tuple(
            NewMessage(message_id="", summarised_to=0, body=b"", steer_bytes=size)
            for size in (*ask["entered"], *[None] * (ask["messages"] - len(ask["entered"])))
        ),
        calls=tuple(_change(call_change, now) for call_change in ask["calls"]),
        state=RunState[ask["state"]] if ask["state"] else None,
        waits=tuple(ask["waits"]) if ask["state"] == "WAITING" else (),
        failure=_FAILURE if ask["failure"] else None,
        output=run_pb2.Run(output_text=ask["commit"]).SerializeToString() if ask["state"] in ENDED else None,
        stop_cause=StopCause[ask["cause"]] if ask["cause"] else None,
        loop_state=ask["commit"].encode(),
        usage=_usage(*ask["usage"][:3]) if ask["usage"] else None,
        model=ask["usage"][3] if ask["usage"] else "",
        consumed=tuple(ask["consumed"]),
        lease=LeaseAction[ask["lease"]],
        wake_time=None if ask["wake"] is None else now + timedelta(seconds=ask["wake"]),
        after_seq=ask["after_seq"],
        unstopped=_unstopped(ask["unstopped"]),
        delegations=tuple(
            Delegation(call_id=name, run_id=child, message=b"", options=b"")
            for name, child in ask["delegations"].items()
        ),
    )


def _usage(input_tokens: int, output_tokens: int, delegated: int) -> bytes:
    usage = run_pb2.Usage(input_tokens=input_tokens, output_tokens=output_tokens, model_calls=1)
    return run_pb2.Run(usage=usage, delegated_usage=run_pb2.Usage(input_tokens=delegated)).SerializeToString()


def _unstopped(call_ids: list[str]) -> bytes | None:
    return run_pb2.Run(unstopped_call_ids=call_ids).SerializeToString() if call_ids else None


def _change(call_change: Row, now: datetime) -> CallChange:
    deadline = None if call_change["deadline"] is None else now + timedelta(seconds=call_change["deadline"])
    return change(
        call_change["call"],
        CallState[call_change["state"]],
        index=CALLS.index(call_change["call"][-1]),
        tool_name=call_change["tool"],
        fallback_tool_name=call_change["fallback"],
        arguments=call_change["arguments"].encode(),
        attempt=call_change["attempt"],
        digest=call_change["digest"],
        deadline_time=deadline,
        result=b"" if call_change["has_result"] else None,
        approvals_required=call_change["required"],
        escalated=call_change["escalated"],
        has_default=call_change["default"],
        child_run_id=call_change["child"],
    )


def _command(ask: Row) -> Command:
    match ask["kind"]:
        case "decide":
            return Decide(
                call_id=ask["call"],
                kind=DecisionKind[ask["decision"]],
                digest=ask["digest"],
                arguments=ask["arguments"].encode(),
                edited_digest=ask["edited_digest"],
                reason="",
                right=DecisionRight[ask["right"]],
            )
        case "result":
            return ToolResult(call_id=ask["call"], client_id=ask["client"], offer_epoch=ask["offer_epoch"])
        case "progress":
            return Progress(
                call_id=ask["call"],
                client_id=ask["client"],
                offer_epoch=ask["offer_epoch"],
                fraction=None,
                message="",
            )
        case "resolve":
            return Resolve(call_id=ask["call"])
        case "cancel":
            return Cancel(cause=StopCause.OPERATOR if ask["operator"] else StopCause.USER)
        case "redrive":
            return Redrive()
        case "top_up":
            return TopUp(tokens=ask["tokens"])
        case _:
            return Steer(text_bytes=ask["bytes"])
