"""Converts a run's log to AG-UI events, for both generations of the protocol. Performs no I/O.

Ids depend only on the log. Every conversion of a log therefore results in the same ids, wherever in the log it starts.
The input is protobuf JSON, and the output is AG-UI JSON.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

Json: TypeAlias = dict[str, Any]
# The ids of the client's user messages, by text and then in order. Each id is used once.
Names: TypeAlias = dict[str, list[str]]

ENDED: Final = frozenset({"RUN_STATE_COMPLETED", "RUN_STATE_FAILED", "RUN_STATE_CANCELLED", "RUN_STATE_EXPIRED"})
_SETTLED: Final = frozenset(
    f"CALL_STATE_{state}"
    for state in ("SUCCEEDED", "FAILED", "REJECTED", "EXPIRED", "CANCELLED", "OUTCOME_UNKNOWN", "DETACHED")
)
# Type of the activity that shows a background job.
JOB_ACTIVITY: Final = "pawl.job"
_TEXT: Final = ("TEXT_MESSAGE", "assistant")
_REASONING: Final = ("REASONING_MESSAGE", "reasoning")


def decoded(content: str) -> str:
    return base64.b64decode(content).decode("utf-8", "replace")


def arguments(call: Json) -> str:
    """Return a call's arguments as text, which is JSON unless the model wrote something else."""
    return decoded(call.get("argumentsJson", "")) or call.get("proposedArguments", "")


def output_id(run_id: str, first_output_seq: object) -> str:
    """Return an assistant message's id, a combination of its run's id and the seq of its first output."""
    return f"{run_id}-{first_output_seq}"


def message_of(message: Json, client_ids: Names) -> list[Json]:
    """Convert a message to AG-UI messages, reasoning first and without calls. A notice results in no message."""
    role, text = message.get("role"), message.get("text", "")
    if role == "ROLE_USER":
        parts = message.get("parts", ())
        own = parts[0].get("text", text) if parts else text
        ids = client_ids.get(own)
        name = ids.pop(0) if ids else message["messageId"]
        return [{"id": name, "role": "user", "content": own}]
    if role != "ROLE_ASSISTANT":
        return []
    first = message.get("firstOutputSeq", "0")
    name = output_id(message["runId"], first) if first != "0" else message["messageId"]
    found: list[Json] = []
    if message.get("reasoning"):
        found.append({"id": f"{name}-reasoning", "role": "reasoning", "content": message["reasoning"]})
    return [*found, {"id": name, "role": "assistant", "content": text + message.get("refusal", "")}]


def tool_call(call: Json) -> Json:
    function = {"name": call.get("toolName", ""), "arguments": arguments(call)}
    return {"id": call["callId"], "type": "function", "function": function}


def result_text(call: Json) -> str:
    omitted = call.get("resultOmittedBytes", "0")
    if omitted != "0":
        return json.dumps({"omittedBytes": int(omitted), "note": "ListCalls returns the full result."})
    return decoded(call.get("result", {}).get("contentJson", ""))


def tool_message(call: Json, message_id: str) -> Json:
    found = {"id": message_id, "role": "tool", "toolCallId": call["callId"], "content": result_text(call)}
    return found | ({"error": call["result"].get("errorReason", "")} if call.get("result", {}).get("isError") else {})


def is_settled(call: Json) -> bool:
    return call.get("state") in _SETTLED


class Fold:
    """Converts one run's events to AG-UI events, in order. Ignores events that it has already processed.

    Every START is followed by its END before the AG-UI run finishes. A MESSAGES_SNAPSHOT retracts the output of a
    failed attempt, so that no text appears twice.
    """

    def __init__(
        self,
        run_id: str,
        *,
        legacy: bool,
        before: Sequence[Json] = (),
        client_ids: Names | None = None,
        results: Mapping[str, str] | None = None,
    ) -> None:
        """Create an empty fold.

        `before` contains the messages before the run. `results` maps calls to the ids of tool messages that the client
        already has. `legacy` selects AG-UI 0.0.x.
        """
        self._run_id = run_id
        self._legacy = legacy
        self._before = list(before)
        self._client_ids = client_ids if client_ids is not None else {}
        self._results = dict(results or {})
        self._messages: list[Json] = []
        self._open: dict[tuple[str, str], Json] = {}
        self._step = ""
        self._round_id = ""
        self._spans = 0
        self._is_summary = False
        self._has_user = False
        self._agents: dict[str, Json] = {}
        self.calls: dict[str, Json] = {}
        self.run: Json = {}
        self.seq = 0

    def fold(self, event: Json) -> list[Json]:
        """Convert one event. Only `finish` returns the events that end the AG-UI run."""
        seq = int(event.get("seq", "0"))
        if seq <= self.seq:
            return []
        self.seq = seq
        for name, handle in (
            ("runChanged", self._run_changed),
            ("messageAdded", self._message_added),
            ("roundStarted", self._round_started),
            ("outputDelta", self._output),
            ("roundRetrying", self._round_retrying),
            ("roundEnded", self._round_ended),
            ("callChanged", self._call_changed),
            ("toolProgress", lambda value: [_custom("pawl.progress", value)]),
            ("warning", lambda value: [_custom("pawl.warning", value)]),
        ):
            if name in event:
                return handle(event[name])
        return []

    def gap(self, gap: Json) -> list[Json]:
        snapshot = gap.get("snapshot", {})
        self.seq, self.run = int(gap.get("toSeq", "0")), snapshot.get("run", self.run)
        events = self._close()
        calls = {call["callId"]: call for call in snapshot.get("calls", ())}
        self.calls = calls
        self._messages = with_calls(snapshot.get("messages", ()), calls, self._client_ids, self._results)
        return [*events, self.snapshot()]

    def snapshot(self) -> Json:
        return {"type": "MESSAGES_SNAPSHOT", "messages": copy.deepcopy([*self._before, *self._messages])}

    def attach(self) -> list[Json]:
        """Return the events that bring a newly attached client up to date.

        The events contain complete messages and partial output, and report whether an operator is needed.
        """
        events = [self.snapshot(), *_step("STEP_STARTED", self._step)]
        for (prefix, role), message in self._open.items():
            events += [*_start_events(prefix, role, message["id"]), _piece(prefix, message["id"], message["content"])]
        agents = (event for call in self._agents.values() for event in self._agent_started(call))
        return [*events, *agents, *self._needs_attention()]

    def finish(self, outcome: Json) -> list[Json]:
        """Close everything that is open, and end the AG-UI run with RUN_FINISHED or RUN_ERROR.

        A snapshot of all messages precedes an interrupt, because the interrupt may be answered from another page.
        """
        kind = {} if outcome["type"] == "RUN_ERROR" else outcome.get("outcome", {})
        closed = self._close()
        for child, call in self._agents.items():
            ended: Json = {"type": "SUBAGENT_FINISHED", "subagentRunId": child}
            waits = is_settled(call) is False and kind.get("type") != "success"
            closed.append(ended | ({"outcome": {"type": "suspended"}} if waits else {}))
        snapshot = [self.snapshot()] if kind.get("type") == "interrupt" else []
        return [*closed, *_step("STEP_FINISHED", self._step), *snapshot, outcome]

    def _run_changed(self, change: Json) -> list[Json]:
        self.run = change.get("run", {})
        return self._needs_attention()

    def _needs_attention(self) -> list[Json]:
        if self.run.get("state") != "RUN_STATE_NEEDS_ATTENTION":
            return []
        return [_custom("pawl.needs_attention", self.run.get("attention", {}))]

    def _message_added(self, change: Json) -> list[Json]:
        message = change.get("message", {})
        found = message_of(message, self._client_ids)
        if message.get("role") == "ROLE_ASSISTANT":
            closed, has = self._close(), {each["id"] for each in self._messages}
            found = [each for each in found if each["content"] or not message.get("callIds")]
            fresh = [each for each in found if each["id"] not in has]
            return [*closed, *self._add_whole(fresh)]
        if not self._has_user:  # the client already has the message that started the run
            self._has_user = True
            known = {each["id"] for each in self._before}
            self._messages += [each for each in found if each["id"] not in known]
            return []
        return self._add_whole(found)

    def _add_whole(self, messages: Sequence[Json]) -> list[Json]:
        events: list[Json] = []
        for each in messages:
            self._messages.append(each)
            prefix = _REASONING[0] if each["role"] == "reasoning" else _TEXT[0]
            piece = [_piece(prefix, each["id"], each["content"])] if each["content"] else []
            events += [*_start_events(prefix, each["role"], each["id"]), *piece, *_end_events(prefix, each["id"])]
        return events

    def _round_started(self, started: Json) -> list[Json]:
        name = f"round {started.get('round', 0)}"
        self._is_summary, void, self._round_id, self._spans = bool(started.get("summary")), self._round_id, "", 0
        if name == self._step:
            return [*self._close(), *self._retract(void)]
        events = [*self._close(), *_step("STEP_FINISHED", self._step), *_step("STEP_STARTED", name)]
        self._step = name
        return events

    def _round_ended(self, _: Json) -> list[Json]:
        events = [*self._close(), *_step("STEP_FINISHED", self._step)]
        self._step = ""
        return events

    def _output(self, output: Json) -> list[Json]:
        if self._is_summary:
            return []
        self._round_id = self._round_id or output_id(self._run_id, self.seq)
        events: list[Json] = []
        if output.get("reasoning"):
            self._spans += _REASONING not in self._open
            number = f"-{self._spans}" if self._spans > 1 else ""
            events += self._write(_REASONING, f"{self._round_id}-reasoning{number}", output["reasoning"])
        text = output.get("text", "") + output.get("refusal", "")
        if text and _REASONING in self._open:
            events += self._close(_REASONING)
        return [*events, *self._write(_TEXT, self._round_id, text)]

    def _write(self, kind: tuple[str, str], message_id: str, text: str) -> list[Json]:
        if not text:
            return []
        events: list[Json] = []
        if kind not in self._open:
            self._open[kind] = {"id": message_id, "role": kind[1], "content": ""}
            events = _start_events(*kind, message_id)
        self._open[kind]["content"] += text
        return [*events, _piece(kind[0], message_id, text)]

    def _close(self, *kinds: tuple[str, str]) -> list[Json]:
        events: list[Json] = []
        for kind in kinds or tuple(self._open):
            message = self._open.pop(kind)
            self._messages.append(message)
            events += _end_events(kind[0], message["id"])
        return events

    def _round_retrying(self, retrying: Json) -> list[Json]:
        events = self._close()
        details = {name: retrying[name] for name in ("round", "reason", "message") if name in retrying}
        void, self._round_id, self._spans = self._round_id, "", 0
        return [*events, _custom("pawl.retrying", details), *self._retract(void)]

    def _retract(self, void: str) -> list[Json]:
        if not void:
            return []
        self._messages = [each for each in self._messages if each["id"] != void]
        for each in self._messages:  # clients keep reasoning that a snapshot leaves out
            if each["id"].startswith(f"{void}-reasoning"):
                each["content"] = ""
        return [self.snapshot()]

    def _call_changed(self, change: Json) -> list[Json]:
        call = change.get("call", {})
        call_id, known = call["callId"], self.calls.get(call["callId"])
        self.calls[call_id] = call
        events: list[Json] = []
        if known is None:
            events += [*self._close(), *self._call_started(call)]
        elif tool_call(known) != tool_call(call):
            self._message_of_call(call)["toolCalls"] = [
                tool_call(call) if each["id"] == call_id else each for each in self._message_of_call(call)["toolCalls"]
            ]
            events.append(self.snapshot())
        if call.get("state") == "CALL_STATE_DELEGATED" and call.get("childRunId") and not self._legacy:
            if call["childRunId"] not in self._agents:
                events += self._agent_started(call)
            self._agents[call["childRunId"]] = call
        if is_settled(call) and not (known and is_settled(known)):
            events += self._call_settled(call)
        return events

    def _call_started(self, call: Json) -> list[Json]:
        carrier = self._message_of_call(call)
        carrier.setdefault("toolCalls", []).append(tool_call(call))
        call_id, written = call["callId"], arguments(call)
        named = {"toolCallName": call.get("toolName", ""), "parentMessageId": carrier["id"]}
        pieces = [{"type": "TOOL_CALL_ARGS", "toolCallId": call_id, "delta": written}] if written else []
        started = {"type": "TOOL_CALL_START", "toolCallId": call_id, **named}
        return [started, *pieces, {"type": "TOOL_CALL_END", "toolCallId": call_id}]

    def _message_of_call(self, call: Json) -> Json:
        for each in self._messages:
            if any(carried["id"] == call["callId"] for carried in each.get("toolCalls", ())):
                return each
        mine = [each for each in self._messages if each["id"] == self._round_id]
        if mine:
            return mine[0]
        self._round_id = self._round_id or f"{self._run_id}-round-{call.get('round', 0)}"
        self._messages.append({"id": self._round_id, "role": "assistant", "content": ""})
        return self._messages[-1]

    def _call_settled(self, call: Json) -> list[Json]:
        call_id, events = call["callId"], list[Json]()
        if self._agents.pop(call.get("childRunId", ""), None) is not None:
            events.append({"type": "SUBAGENT_FINISHED", "subagentRunId": call["childRunId"]})
        given = self._results.get(call_id)
        message = tool_message(call, given or f"{call_id}-result")
        self._messages.append(message)
        if given is None:
            value = {"messageId": message["id"], "toolCallId": call_id, "content": message["content"], "role": "tool"}
            events.append({"type": "TOOL_CALL_RESULT", **value})
        else:
            events.append(self.snapshot())
        return events

    def _agent_started(self, call: Json) -> list[Json]:
        named = {"name": call.get("toolName", ""), "parentToolCallId": call["callId"]}
        return [{"type": "SUBAGENT_STARTED", "subagentRunId": call["childRunId"], **named}]


def with_calls(
    messages: Sequence[Json], calls: Mapping[str, Json], client_ids: Names, results: Mapping[str, str]
) -> list[Json]:
    found: list[Json] = []
    for message in messages:
        found += message_of(message, client_ids)
        asked = [calls[call_id] for call_id in message.get("callIds", ()) if call_id in calls]
        if asked and found:
            found[-1]["toolCalls"] = [tool_call(call) for call in asked]
        for call in asked:
            if is_settled(call):
                found.append(tool_message(call, results.get(call["callId"], f"{call['callId']}-result")))
    return found


def job_activity(job: Json) -> Json:
    """Return the event that shows a background job as an activity. Its message id is the job's id."""
    content = {name: value for name, value in job.items() if name not in {"lastResult", "pendingCalls"}}
    if "argumentsJson" in content.get("definition", {}):
        content["definition"] = content["definition"] | {"argumentsJson": arguments(content["definition"])}
    return {
        "type": "ACTIVITY_SNAPSHOT",
        "messageId": job["jobId"],
        "activityType": JOB_ACTIVITY,
        "content": content,
        "replace": True,
    }


def _custom(name: str, value: Any) -> Json:
    return {"type": "CUSTOM", "name": name, "value": value}


def _step(kind: str, name: str) -> list[Json]:
    return [{"type": kind, "stepName": name}] if name else []


def _start_events(prefix: str, role: str, message_id: str) -> list[Json]:
    span = [{"type": "REASONING_START", "messageId": message_id}] if role == "reasoning" else []
    return [*span, {"type": f"{prefix}_START", "messageId": message_id, "role": role}]


def _piece(prefix: str, message_id: str, text: str) -> Json:
    return {"type": f"{prefix}_CONTENT", "messageId": message_id, "delta": text}


def _end_events(prefix: str, message_id: str) -> list[Json]:
    span = [{"type": "REASONING_END", "messageId": message_id}] if prefix == _REASONING[0] else []
    return [{"type": f"{prefix}_END", "messageId": message_id}, *span]
