from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pawl.event.v1 import call_pb2, event_pb2, run_pb2

TIME = datetime(2026, 5, 1, tzinfo=UTC)


def event(kind: str, name: str = "1", **fields: Any) -> event_pb2.RunEvent:
    made = event_pb2.RunEvent(
        store_id="acme", conversation_id="conv_1", run_id=f"run_{name}", event_id=f"evt_{name}", type=kind
    )
    made.MergeFrom(event_pb2.RunEvent(**fields))
    made.time.FromDatetime(TIME)
    return made


def of(kind: str, name: str = "1", **run: Any) -> event_pb2.RunEvent:
    return event(f"run.{kind}", name, run_changed=event_pb2.RunChanged(run=run_pb2.Run(user_id="ann", **run)))


def ended_job(
    name: str = "1", kind: str = "completed", *, reports_to: str = "conv_2", **run: Any
) -> event_pb2.RunEvent:
    job = run_pb2.Job(tool_name="book_flight", reports=run_pb2.JOB_REPORTS_END)
    return of(kind, name, job=job, reports_to_conversation_id=reports_to, output_text="done", **run)


def asked(name: str = "1", *, preview: str = "", escalated: bool = False, by: str = "") -> event_pb2.RunEvent:
    approval = call_pb2.ApprovalRequest(preview=preview, cause="category SENSITIVE", escalated=escalated)
    if by:
        approval.approvals.add(user_id=by)
    call = call_pb2.Call(call_id="call_1", user_id="ann", tool_name="send_email", approval=approval)
    call.state = call_pb2.CALL_STATE_AWAITING_APPROVAL
    call.deadline_time.FromDatetime(datetime(2026, 5, 2, tzinfo=UTC))
    return event("tool.awaiting_approval", name, call_changed=event_pb2.CallChanged(call=call))
