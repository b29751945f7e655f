"""The ledger after the demo, read through the public API, and the checks against it."""

from __future__ import annotations

import asyncio
import email.parser
import email.policy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Final

from pawl.cli.demo_story import Evidence
from pawl.cli.transcript import ENDED
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.notify.v1 import notify_pb2

SECONDS_MAX: Final = 60.0
_PAGE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The run as the services remember it."""

    run: run_pb2.Run
    calls: Sequence[call_pb2.Call]
    messages: Sequence[message_pb2.Message]
    events: Sequence[event_pb2.RunEvent]
    notifications: Sequence[notify_pb2.Notification]
    mails: Sequence[EmailMessage]

    def call(self, tool_name: str) -> call_pb2.Call:
        """Return the first call of a tool.

        Raises:
            NotSo: there is none.
        """
        for call in self.calls:
            if call.tool_name == tool_name:
                return call
        raise NotSo(f"there is no call of {tool_name}")


class NotSo(Exception):
    """Something that should have happened did not; the message says what is there instead."""


async def read_ledger(target: AsyncClient, run_id: str, outbox: Path) -> Ledger:
    """Read everything anew, from the services and the outbox folder."""
    run = await target.get(run_id)
    of_user = notify_pb2.ListNotificationsRequest(page_size=_PAGE)
    return Ledger(
        run=run,
        calls=[call async for call in target.calls(run_id)],
        messages=[message async for message in target.messages(run.conversation_id)],
        events=[event async for event in target.watch(run_id) if isinstance(event, event_pb2.RunEvent)],
        notifications=(await target.notifier.ListNotifications(of_user)).notifications,
        mails=await asyncio.to_thread(_mails, outbox),
    )


def _mails(outbox: Path) -> list[EmailMessage]:
    parser = email.parser.BytesParser(policy=email.policy.default)
    return [parser.parsebytes(path.read_bytes()) for path in sorted(outbox.glob("*/*.eml"))]


def _log(ledger: Ledger, _: Evidence) -> str:
    seqs = [event.seq for event in ledger.events]
    _require(seqs == list(range(1, len(seqs) + 1)) and bool(seqs), f"the log has the numbers {seqs}")
    ends = [event.seq for event in ledger.events if event.run_changed.run.state in ENDED]
    _require(ends == seqs[-1:], f"events {ends} end the run, the last is {seqs[-1]}")
    _require(ledger.run.state == run_pb2.RUN_STATE_COMPLETED, "the run is not completed")
    return f"{len(seqs)} events, numbered without a gap, the last one ends the run"


def _reasoning(ledger: Ledger, _: Evidence) -> str:
    reasons = [message for message in ledger.messages if message.reasoning]
    streamed = [event for event in ledger.events if event.output_delta.reasoning]
    _require(bool(reasons) and bool(streamed), "no reasoning was streamed and stored")
    return f"stored with {len(reasons)} messages"


def _text(ledger: Ledger, evidence: Evidence) -> str:
    text = ledger.run.output_text
    answers = [message.text for message in ledger.messages if message.role == message_pb2.ROLE_ASSISTANT]
    _require(answers[-1:] == [text], "the last message is not the output of the run")
    _require(text.rstrip().endswith(evidence.last_words), f"the answer ends with {text[-20:]!r}")
    return f"{len(text)} characters, complete to the last one"


def _dependent_calls(ledger: Ledger, _: Evidence) -> str:
    created, added = ledger.call("create_task"), ledger.call("add_subtask")
    for call in (created, added):
        _require(call.state == call_pb2.CALL_STATE_SUCCEEDED, f"{call.tool_name} did not succeed")
        _require(call.context == call_pb2.EXECUTION_CONTEXT_BACKEND, f"{call.tool_name} is no backend tool")
    task_id = _result(created).get("task_id")
    _require(bool(task_id) and _result(added)["parent"]["task_id"] == task_id, "the subtask has another parent")
    _require(created.round == added.round, "they were not asked for in one batch")
    return f"the subtask belongs to {task_id}, created just before in the same batch"


def _front_end(ledger: Ledger, evidence: Evidence) -> str:
    call = ledger.call("show_panel")
    _require(call.context == call_pb2.EXECUTION_CONTEXT_FRONTEND, "show_panel is no front-end tool")
    _require(call.state == call_pb2.CALL_STATE_SUCCEEDED, "show_panel did not succeed")
    _require(_result(call) == {"shown_as": evidence.panel}, "its result is not the one of this client")
    return f"its result, {evidence.panel}, is what this client returned"


def _question(ledger: Ledger, evidence: Evidence) -> str:
    call = ledger.call("ask_user")
    _require(call.state == call_pb2.CALL_STATE_SUCCEEDED, "the question was not answered")
    _require(evidence.answer in call.result.content_json.decode(), "the result is not the answer that was given")
    return f'"{call.question.question}" was answered with "{evidence.answer}"'


def _edited_mail(ledger: Ledger, evidence: Evidence) -> str:
    call = ledger.call("send_email")
    _require(call.state == call_pb2.CALL_STATE_SUCCEEDED, "send_email did not succeed")
    _require(call.approval.decision.kind == call_pb2.DECISION_KIND_EDIT, "it was not approved with an edit")
    arguments, proposed = json.loads(call.arguments_json), json.loads(call.proposed_arguments)
    _require(arguments["subject"] == evidence.subject != proposed["subject"], "the arguments are not the edited ones")
    subjects = [str(mail["Subject"]) for mail in ledger.mails]
    _require(subjects == [evidence.subject], f"the outbox has the mails {subjects}")
    return f'one mail in the outbox, "{evidence.subject}" instead of "{proposed["subject"]}"'


def _takeover(ledger: Ledger, evidence: Evidence) -> str:
    _require(evidence.killed_pid > 0 and not _alive(evidence.killed_pid), "no process was killed")
    last_before = max(
        (event.seq for event in ledger.events if event.attempt == evidence.attempt_when_killed), default=0
    )
    after = [event for event in ledger.events if event.seq > last_before and event.attempt]
    attempts = sorted({event.attempt for event in after})
    _require(bool(attempts) and min(attempts) > evidence.attempt_when_killed, f"epochs after the kill: {attempts}")
    _require(evidence.victim_stayed_down, "the killed replica was up again before the run ended")
    return f"epoch {evidence.attempt_when_killed} died at event {last_before}, epoch {attempts[-1]} finished"


def _resumed(ledger: Ledger, evidence: Evidence) -> str:
    _require(len(evidence.connections_after_kill) > 0, "the client's connection was not broken by the kill")
    seen = [event.SerializeToString(deterministic=True) for event in evidence.seen]
    logged = [event.SerializeToString(deterministic=True) for event in ledger.events]
    _require(seen == logged, f"the client saw {len(seen)} events, the log has {len(logged)}")
    return f"it went on at {evidence.connections_after_kill[0]} and saw every event once, byte for byte"


def _settled(ledger: Ledger, _: Evidence) -> str:
    _require(bool(ledger.calls), "there are no calls")
    open_calls = [
        call.tool_name for call in ledger.calls if not call.HasField("result") or not call.HasField("end_time")
    ]
    _require(not open_calls, f"calls without a result: {open_calls}")
    _require(not ledger.run.pending_calls, "calls still wait")
    return f"each of {len(ledger.calls)} calls has its one result"


def _notification(ledger: Ledger, evidence: Evidence) -> str:
    completed = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    heard = [n for n in evidence.heard if n.run_id == ledger.run.run_id and n.kind == completed]
    _require(len(heard) == 1, f"{len(heard)} notifications of the end were heard on NATS")
    stored = [n.notification_id for n in ledger.notifications if n.kind == completed]
    _require(stored == [heard[0].notification_id], f"the inbox has {stored}")
    _require(heard[0].event_id == ledger.events[-1].event_id, "it is about another event")
    return f'"{heard[0].title}" was heard once on NATS and is in the inbox'


def _metrics(_: Ledger, evidence: Evidence) -> str:
    _require(bool(evidence.metric), "no such line in /metrics")
    return evidence.metric


def _time(_: Ledger, evidence: Evidence) -> str:
    _require(evidence.seconds < SECONDS_MAX, f"it took {evidence.seconds:.0f} s")
    return f"{evidence.seconds:.0f} s from an empty folder to here"


Check = Callable[[Ledger, Evidence], str]

CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("the run is complete in the log", _log),
    ("reasoning", _reasoning),
    ("text", _text),
    ("two backend calls, the second needs the first", _dependent_calls),
    ("a front-end call, answered by this client", _front_end),
    ("a question, answered", _question),
    ("send_email, approved with an edited argument", _edited_mail),
    ("kill -9 while the model streamed, finished by another replica", _takeover),
    ("the client reconnected and resumed", _resumed),
    ("nothing is left open", _settled),
    ("a NATS subscriber was notified", _notification),
    ("Prometheus metrics", _metrics),
    ("in time", _time),
)


def verdicts(ledger: Ledger, evidence: Evidence) -> list[tuple[str, bool, str]]:
    """Return for each check its name, whether it holds, and what was found."""
    found: list[tuple[str, bool, str]] = []
    for name, check in CHECKS:
        try:
            found.append((name, True, check(ledger, evidence)))
        except (NotSo, KeyError, IndexError, ValueError, TypeError) as error:
            found.append((name, False, str(error) if isinstance(error, NotSo) else f"unexpected {error!r}"))
    return found


def _require(condition: bool, otherwise: str) -> None:  # noqa: FBT001  # reads like assert
    if not condition:
        raise NotSo(otherwise)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _result(call: call_pb2.Call) -> Any:
    return json.loads(call.result.content_json)
