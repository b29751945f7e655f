"""A small handwritten record without violations. It includes the runs of two users, a workflow and a goal."""

from __future__ import annotations

import json

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent_loop.goals.rules import Step
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.notify.v1 import notify_pb2
from tests.chaos.front_ends import seen
from tests.chaos.history import Effect, History, Kind, Outcome
from tests.chaos.prompts import AGAIN, GATED, PANEL
from tests.chaos.world import Record

MAIN, STOPPED, FOREIGN, JOB = "run-main", "run-stopped", "run-foreign", "run-job"
FLOW, GOAL = "run-flow", "run-goal"
BUTTON, ROCKET, PANEL_CALL, QUESTION = "call-button", "call-rocket", "call-panel", "call-question"
DETACHED, ITERATION = "call-detached", "call-iteration"
# Two iterations of a node, and an attempt that would repeat the first.
NODE, NODE_AGAIN, NODE_RETRIED = (f"node_{'0' * 24}_1_{key}" for key in ("0_0_0", "1_0_0", "0_1_0"))
CHECK, ATTEMPT, JUDGEMENT = "call-check", "call-attempt", "call-judgement"
OWNERS = dict.fromkeys((MAIN, STOPPED, JOB, FLOW, GOAL), ("north", "ann")) | {FOREIGN: ("south", "bob")}
# The runs of calls that are not of the main run, and their places in it.
_RUNS = {ITERATION: JOB, NODE: FLOW, NODE_AGAIN: FLOW, CHECK: GOAL, ATTEMPT: GOAL, JUDGEMENT: GOAL}
_STEPS = {CHECK: (0, Step.CHECK_BEFORE), ATTEMPT: (1, Step.ATTEMPT), JUDGEMENT: (1, Step.JUDGEMENT)}

_TOOLS = {
    BUTTON: "press_button",
    ROCKET: GATED,
    PANEL_CALL: PANEL,
    QUESTION: "ask_user",
    DETACHED: "set_valve",
    ITERATION: "set_valve",
    NODE: "set_valve",
    NODE_AGAIN: "set_valve",
    CHECK: "read_meter",
    ATTEMPT: "run_agent",
    JUDGEMENT: "read_meter",
}


class Story:
    def __init__(self) -> None:
        self.record = Record(history=History())
        self._time = 1_000_000.0

    def start(self, run_id: str) -> None:
        store_id, user_id = OWNERS[run_id]
        operation = self.record.history.invoke(
            Kind.START, store_id=store_id, user_id=user_id, request_id=f"start-{run_id}", content=f"do {run_id}"
        )
        self.record.history.answer(operation, Outcome.OK, run_id=run_id, run_state="QUEUED")
        self.record.owners[run_id] = [(store_id, user_id)]
        self.record.runs[run_id] = run_pb2.Run(
            store_id=store_id, user_id=user_id, run_id=run_id, conversation_id=f"conversation-{run_id}"
        )
        self.record.logs[run_id] = []
        self.becomes(run_id, "QUEUED")
        self.say(run_id, message_pb2.ROLE_USER, operation.content)
        self.becomes(run_id, "RUNNING", attempt=1)
        self.round(run_id, 1)

    def write(self, run_id: str, *, attempt: int = 1, **kind: object) -> event_pb2.RunEvent:
        run, log = self.record.runs[run_id], self.record.logs[run_id]
        self._time += 1
        event = event_pb2.RunEvent(
            store_id=run.store_id,
            conversation_id=run.conversation_id,
            run_id=run_id,
            seq=len(log) + 1,
            time=Timestamp(seconds=int(self._time)),
            attempt=attempt,
            event_id=f"event-{run_id}-{len(log) + 1}",
            **kind,  # type: ignore[arg-type]
        )
        log.append(event)
        run.last_seq = event.seq
        return event

    def becomes(self, run_id: str, state: str, *, attempt: int = 0, reason: str = "") -> event_pb2.RunEvent:
        run = self.record.runs[run_id]
        before, run.state = run.state, run_pb2.RunState.Value(f"RUN_STATE_{state}")
        if reason:
            run.failure.reason = reason
        changed = event_pb2.RunChanged(from_state=before)
        changed.run.CopyFrom(run)
        return self.write(run_id, attempt=attempt, run_changed=changed)

    def ends(self, run_id: str, state: str, reason: str = "") -> None:
        event = self.becomes(run_id, state, attempt=1, reason=reason)
        good_record = self.record.notifications.setdefault(OWNERS[run_id], [])
        number = len(good_record) + 1
        good_record.append(
            notify_pb2.Notification(
                notification_id=f"notification-{run_id}",
                store_id=event.store_id,
                user_id=OWNERS[run_id][1],
                number=number,
                event_id=event.event_id,
            )
        )

    def round(self, run_id: str, number: int) -> None:
        self.write(run_id, round_started=event_pb2.RoundStarted(round=number, model_attempt=1))
        self.record.runs[run_id].round = number

    def say(
        self,
        run_id: str,
        role: message_pb2.Role.ValueType,
        text: str,
        *,
        first_output_seq: int = 0,
        notices_json: bytes = b"",
    ) -> None:
        run = self.record.runs[run_id]
        messages = self.record.messages.setdefault(run.conversation_id, [])
        message = message_pb2.Message(
            run_id=run_id,
            number=len(messages) + 1,
            role=role,
            text=text,
            first_output_seq=first_output_seq,
            last_output_seq=first_output_seq,
            notices_json=notices_json,
        )
        messages.append(message)
        self.write(run_id, message_added=event_pb2.MessageAdded(message=message))

    def answer(self, run_id: str, text: str) -> None:
        event = self.write(run_id, output_delta=event_pb2.OutputDelta(text=text))
        self.say(run_id, message_pb2.ROLE_ASSISTANT, text, first_output_seq=event.seq)

    def call(self, call_id: str, *states: str, result: str = "") -> None:
        """Move the call through these states. Store `result` with the last state."""
        call = self.record.calls.get(call_id) or _new_call(call_id)
        self.record.calls[call_id] = call
        for state in states:
            call.state = call_pb2.CallState.Value(f"CALL_STATE_{state}")
            if state in {"SUCCEEDED", "DETACHED"}:
                call.result.content_json = result.encode()
            changed = event_pb2.CallChanged()
            changed.call.CopyFrom(call)
            self.write(call.run_id, call_changed=changed)

    def happens(self, call_id: str) -> None:
        call = self.record.calls[call_id]
        self._time += 1
        self.record.effects.append(
            Effect(
                time=self._time,
                pid=1,
                tool_name=call.tool_name,
                key=call_id,
                run_id=call.run_id,
                store_id="north",
                user_id="ann",
                arguments=json.loads(call.arguments_json),
                seen_bytes=0,
            )
        )

    def play_job(self) -> None:
        self.call(DETACHED, "DETACHED", result='{"job_id":"run-job"}')
        self.record.owners[JOB] = [OWNERS[JOB]]
        self.record.runs[JOB] = run_pb2.Run(
            store_id="north",
            user_id="ann",
            run_id=JOB,
            conversation_id=f"conversation-{JOB}",
            parent_run_id=MAIN,
            parent_call_id=DETACHED,
            reports_to_conversation_id=f"conversation-{MAIN}",
            job=run_pb2.Job(tool_name=_TOOLS[DETACHED], iterations_max=1),
        )
        self.record.logs[JOB] = []
        self.becomes(JOB, "QUEUED")
        self.becomes(JOB, "RUNNING", attempt=1)
        self.acts(ITERATION, '"set"')
        self.becomes(JOB, "COMPLETED", attempt=1)
        notices = json.dumps([{"job_id": JOB, "state": "COMPLETED", "result": "set"}]).encode()
        self.say(MAIN, message_pb2.ROLE_NOTICE, "set_valve: completed", notices_json=notices)

    def play_workflow(self) -> None:
        self.start(FLOW)
        workflow = self.record.runs[FLOW].workflow
        workflow.name, workflow.input_json = "batch", b'{"items":["a"]}'
        for call_id in (NODE, NODE_AGAIN):
            self.acts(call_id, '"set"')
        self.record.runs[FLOW].output_json = b"1"
        self.ends(FLOW, "COMPLETED")

    def play_goal(self) -> None:
        self.start(GOAL)
        self.record.runs[GOAL].goal.attempts_max = 1
        self.acts(CHECK, '"read_meter"')
        self.call(ATTEMPT, "DELEGATED", "SUCCEEDED", result='"sent"')
        self.acts(JUDGEMENT, f'"read_meter{AGAIN}"')
        self.record.runs[GOAL].output_text = "It is met."
        self.say(GOAL, message_pb2.ROLE_ASSISTANT, "It is met.")
        self.ends(GOAL, "COMPLETED")

    def acts(self, call_id: str, result: str) -> None:
        self.call(call_id, "RUNNING")
        self.happens(call_id)
        self.call(call_id, "SUCCEEDED", result=result)

    def ask(self, kind: Kind, run_id: str, *, call_id: str = "", content: str = "", run_state: str = "") -> None:
        store_id, user_id = OWNERS[run_id]
        about = {"run_id": run_id, "call_id": call_id, "content": content}
        operation = self.record.history.invoke(
            kind, store_id=store_id, user_id=user_id, request_id=f"{kind}-{call_id or run_id}", **about
        )
        self.record.history.answer(operation, Outcome.OK, "ACCEPTED", run_id=run_id, run_state=run_state)


def _new_call(call_id: str) -> call_pb2.Call:
    front_end = call_id in {PANEL_CALL, QUESTION, ATTEMPT}
    round_number, index = _STEPS.get(call_id, (1, 0))
    return call_pb2.Call(
        store_id="north",
        run_id=_RUNS.get(call_id, MAIN),
        call_id=call_id,
        round=round_number,
        index=index,
        tool_name=_TOOLS[call_id],
        tool_version=1,
        context=call_pb2.EXECUTION_CONTEXT_FRONTEND if front_end else call_pb2.EXECUTION_CONTEXT_BACKEND,
        effect_class=call_pb2.EFFECT_CLASS_AT_MOST_ONCE,
        arguments_json=json.dumps({"tag": call_id}).encode(),
    )


def good_record(foreign_end: str = "COMPLETED") -> Record:
    """Return a record without violations.

    `foreign_end` is the final state of the other user's run, or empty if it is open.
    """
    story = Story()
    story.start(MAIN)
    story.call(BUTTON, "RUNNING")
    story.call(ROCKET, "AWAITING_APPROVAL")
    story.call(PANEL_CALL, "OFFERED")
    story.call(QUESTION, "ASKED")
    story.happens(BUTTON)
    story.call(BUTTON, "SUCCEEDED", result='"pressed"')
    story.ask(Kind.RESULT, MAIN, call_id=PANEL_CALL, content='"shown"')
    story.call(PANEL_CALL, "SUCCEEDED", result='"shown"')
    story.ask(Kind.ANSWER, MAIN, call_id=QUESTION, content="yes")
    story.call(QUESTION, "SUCCEEDED", result='"yes"')
    story.ask(Kind.APPROVE, MAIN, call_id=ROCKET, content=story.record.calls[ROCKET].arguments_json.decode())
    story.call(ROCKET, "RUNNING")
    story.happens(ROCKET)
    story.call(ROCKET, "SUCCEEDED", result='"launched"')
    story.play_job()
    story.round(MAIN, 2)
    story.answer(MAIN, "All is done.")
    story.ends(MAIN, "COMPLETED")
    story.start(STOPPED)
    story.ask(Kind.CANCEL, STOPPED, run_state="CANCELLING")
    story.becomes(STOPPED, "CANCELLING")
    story.ends(STOPPED, "CANCELLED")
    story.play_workflow()
    story.play_goal()
    story.start(FOREIGN)
    story.answer(FOREIGN, "Hello.")
    if foreign_end:
        story.ends(FOREIGN, foreign_end, reason="BROKEN" if foreign_end == "FAILED" else "")
    watch(story.record)
    return story.record


def watch(record: Record) -> None:
    record.history.seen = [seen("watcher", event) for log in record.logs.values() for event in log]
