"""The demo cannot claim that something happened when it did not."""

from __future__ import annotations

import json

from pawl.cli.demo import Evidence, verdicts
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.notify.v1 import notify_pb2


def _settled(tool: str, result: object) -> call_pb2.Call:
    call = call_pb2.Call(tool_name=tool, state=call_pb2.CALL_STATE_SUCCEEDED)
    call.result.content_json = json.dumps(result).encode()
    call.end_time.GetCurrentTime()
    return call


def what_happened() -> Evidence:
    mail = _settled("send_email", {"sent": True})
    mail.approval.decision.kind = call_pb2.DECISION_KIND_EDIT
    run = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_COMPLETED, output_text="1 2 60")
    events = [
        event_pb2.RunEvent(seq=1, attempt=1, output_delta=event_pb2.OutputDelta(reasoning="because")),
        event_pb2.RunEvent(seq=2, attempt=2, run_changed=event_pb2.RunChanged(run=run), event_id="evt_2"),
    ]
    completed = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    notification = notify_pb2.Notification(run_id="run_1", event_id="evt_2", kind=completed)
    return Evidence(
        run=run,
        calls=[
            _settled("create_task", {"task_id": "t"}),
            _settled("add_subtask", {"parent": {"task_id": "t"}}),
            _settled("show_panel", {"shown_as": "panel of the demo"}),
            _settled("ask_user", {"answer": "Tonight"}),
            mail,
        ],
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=run.output_text, reasoning="because")],
        events=events,
        inbox=[notification],
        subjects=["lunch at one"],
        seen=list(events),
        heard=[notification],
        answer="Tonight",
        attempt_when_killed=1,
        stayed_down=True,
        connections_after_kill=["127.0.0.1:2"],
        seconds=30.0,
    )


def test_with_all_evidence_every_check_passes() -> None:
    assert set(verdicts(what_happened()).values()) == {True}


def test_without_evidence_no_check_passes() -> None:
    assert set(verdicts(Evidence()).values()) == {False}
