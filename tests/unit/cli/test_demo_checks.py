"""The demo cannot say that something happened when it did not."""

from __future__ import annotations

import json
import subprocess
import sys
from email.message import EmailMessage

from pawl.cli.demo_ledger import CHECKS, Ledger, verdicts
from pawl.cli.demo_story import Evidence
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.notify.v1 import notify_pb2


def _settled(tool: str, result: object, context: call_pb2.ExecutionContext.ValueType) -> call_pb2.Call:
    call = call_pb2.Call(tool_name=tool, state=call_pb2.CALL_STATE_SUCCEEDED, context=context, round=1)
    call.result.content_json = json.dumps(result).encode()
    call.end_time.GetCurrentTime()
    return call


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def what_happened() -> tuple[Ledger, Evidence]:
    """A ledger and a client's evidence with which every check holds."""
    backend, frontend = call_pb2.EXECUTION_CONTEXT_BACKEND, call_pb2.EXECUTION_CONTEXT_FRONTEND
    evidence = Evidence(run_id="run_1", answer="Tonight", killed_pid=_dead_pid(), attempt_when_killed=1, seconds=30.0)
    evidence.victim_stayed_down, evidence.metric = True, "pawl_agent_loop_model_calls_total 1.0"
    evidence.connections_after_kill.append("127.0.0.1:2")
    mail_call = _settled("send_email", {"sent": True}, backend)
    mail_call.approval.decision.kind = call_pb2.DECISION_KIND_EDIT
    mail_call.arguments_json = json.dumps({"subject": evidence.subject}).encode()
    mail_call.proposed_arguments = '{"subject": "lunch"}'
    question = _settled("ask_user", {"answer": "Tonight"}, call_pb2.EXECUTION_CONTEXT_HUMAN)
    question.question.question = "When?"
    mail = EmailMessage()
    mail["Subject"] = evidence.subject
    run = run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_COMPLETED, output_text=f"done {evidence.last_words}")
    events = [
        event_pb2.RunEvent(seq=1, attempt=1, output_delta=event_pb2.OutputDelta(reasoning="because")),
        event_pb2.RunEvent(seq=2, attempt=2, run_changed=event_pb2.RunChanged(run=run), event_id="evt_2"),
    ]
    evidence.seen = list(events)
    told = notify_pb2.Notification(
        notification_id="ntf_1", run_id="run_1", event_id="evt_2", kind=notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    )
    evidence.heard.append(told)
    ledger = Ledger(
        run=run,
        calls=[
            _settled("create_task", {"task_id": "t"}, backend),
            _settled("add_subtask", {"parent": {"task_id": "t"}}, backend),
            _settled("show_panel", {"shown_as": evidence.panel}, frontend),
            question,
            mail_call,
        ],
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=run.output_text, reasoning="because")],
        events=events,
        notifications=[told],
        mails=[mail],
    )
    return ledger, evidence


def failed(ledger: Ledger, evidence: Evidence) -> set[str]:
    return {name for name, good, _ in verdicts(ledger, evidence) if not good}


def test_when_everything_happened_every_check_holds() -> None:
    assert failed(*what_happened()) == set()


def test_when_nothing_happened_no_check_holds() -> None:
    nothing = Ledger(run=run_pb2.Run(), calls=[], messages=[], events=[], notifications=[], mails=[])
    assert failed(nothing, Evidence(seconds=61.0)) == {name for name, _ in CHECKS}
