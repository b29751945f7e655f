"""Parses AG-UI requests and the answers in them, converts them, and determines how an AG-UI run ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from pawl.chassis.visible import undecided, visible
from pawl.errors import CallNotFound, DigestMismatch, InvalidField
from pawl.gateway.agui.events import Json, Names, arguments, decoded

_THREAD_BYTES_MAX: Final = 200
_TOKENS_MAX: Final = 2**63 - 1
_APPROVAL: Final[Json] = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}, "editedArgs": {"type": "object"}},
    "required": ["approved"],
}


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: Any = None


class Context(msgspec.Struct, frozen=True):
    description: str = ""
    value: str = ""


class Resume(msgspec.Struct, frozen=True, rename="camel"):
    interrupt_id: str
    status: str
    payload: Any = None


class Options(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The options for Pawl in a request's `forwardedProps.pawl`."""

    agent: str = ""
    on_disconnect: str = "continue"
    follow: bool = False


class Stop(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    thread_id: str
    run_id: str


class Input(msgspec.Struct, frozen=True, rename="camel"):
    """A RunAgentInput of either protocol generation."""

    thread_id: str
    run_id: str
    messages: list[Json]
    protocol_version: str | None = None
    state: Any = None
    tools: list[Tool] = []
    context: list[Context] = []
    forwarded_props: Any = None
    resume: list[Resume] | None = None

    @property
    def is_legacy(self) -> bool:
        """True for AG-UI 0.0.x, which does not send a version."""
        return self.protocol_version is None

    @property
    def request_id(self) -> str:
        """A request id that is always the same for one AG-UI run in a thread."""
        return f"agui_{_hash(self.thread_id, self.run_id)}"

    def id_of(self, verb: str, value: object) -> str:
        """Return a request id that is always the same for the same answers.

        The AG-UI run's id alone is not enough, because some front ends reuse it for each resume.
        """
        return f"{self.request_id}_{_hash(verb, json.dumps(value, sort_keys=True))[:16]}"

    @property
    def message(self) -> Json | None:
        """The last message if it is from the user, otherwise None."""
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "user" else None

    @property
    def results(self) -> dict[str, Json]:
        return {str(each.get("toolCallId")): each for each in self.messages if each.get("role") == "tool"}

    @property
    def user_ids(self) -> Names:
        """Ids of user messages, by text."""
        found: Names = {}
        for each in self.messages:
            if each.get("role") == "user":
                found.setdefault(text_of(each), []).append(each["id"])
        return found


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:40]


def label_of(client_id: str) -> str:
    return _hash(client_id)


def labels(found: Input, message: Json) -> Json:
    return {"agui.message": label_of(message["id"]), "agui.run": label_of(found.run_id)}


def read(value: Any) -> Input:
    """Parse a RunAgentInput.

    Raises:
        InvalidField: The input is invalid. The message contains the position.
    """
    try:
        found = msgspec.convert(value, Input)
    except msgspec.ValidationError as error:
        raise InvalidField(f"The request is not a valid RunAgentInput: {error}"[:500], field="request") from None
    _check_thread(found.thread_id)
    if not found.run_id:
        raise InvalidField("runId must not be empty.", field="runId")
    for index, each in enumerate(found.messages):
        if not isinstance(each.get("id"), str) or not isinstance(each.get("role"), str):
            raise InvalidField(f"messages[{index}] must have an id and a role.", field="messages")
        if each["role"] in {"user", "tool"}:
            text_of(each)
    return found


def _check_thread(thread_id: str) -> None:
    if not 1 <= len(thread_id.encode("utf-8", "replace")) <= _THREAD_BYTES_MAX:
        raise InvalidField(f"threadId must be 1 to {_THREAD_BYTES_MAX} bytes.", field="threadId")


def read_stop(value: Any) -> Stop:
    """Parse a request to stop a run.

    Raises:
        InvalidField: The request is invalid. The message contains the position.
    """
    try:
        found = msgspec.convert(value, Stop)
    except msgspec.ValidationError as error:
        raise InvalidField(f"threadId and runId are required: {error}"[:500], field="request") from None
    _check_thread(found.thread_id)
    return found


def options_of(found: Input) -> Options:
    """Return the options for Pawl in a request.

    Raises:
        InvalidField: An option is invalid.
    """
    props = found.forwarded_props
    try:
        options = msgspec.convert(props.get("pawl", {}) if isinstance(props, dict) else {}, Options)
    except msgspec.ValidationError as error:
        raise InvalidField(f"forwardedProps.pawl: {error}"[:500], field="forwardedProps") from None
    if options.on_disconnect not in {"continue", "cancel"}:
        raise InvalidField("forwardedProps.pawl.onDisconnect must be continue or cancel.", field="forwardedProps")
    if options.follow and (found.message or found.resume):
        raise InvalidField("forwardedProps.pawl.follow is read-only: remove the message or resume.", field="messages")
    return options


def text_of(message: Json) -> str:
    """Return a message's text.

    Raises:
        InvalidField: The message has content other than text.
    """
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    raise InvalidField("Messages must contain only text.", field="messages")


def start(found: Input, message: Json) -> Json:
    """Return the StartRunRequest for a user message.

    Raises:
        InvalidField: A tool's schema is not an object.
    """
    context = "\n".join(f"{each.description}: {each.value}" for each in found.context if each.value)
    asked: Json = {
        "requestId": found.request_id,
        "conversationKey": found.thread_id,
        "text": text_of(message),
        "labels": labels(found, message),
        "frontEndTools": [_definition(tool) for tool in found.tools],
        "agent": options_of(found).agent,
    }
    return asked | ({"parts": [{"text": f"Context from the page:\n{context}"}]} if context else {})


def _definition(tool: Tool) -> Json:
    schema = {"type": "object"} if tool.parameters is None else tool.parameters
    if not isinstance(schema, dict):
        raise InvalidField(f"The parameters of {tool.name[:64]} must be a JSON Schema.", field="tools")
    return {
        "name": tool.name,
        "description": tool.description or tool.name,
        "argumentsSchemaJson": encoded(json.dumps(schema)),
        "context": "EXECUTION_CONTEXT_FRONTEND",
        "category": "TOOL_CATEGORY_SAFE",
        "effectClass": "EFFECT_CLASS_AT_MOST_ONCE",
    }


def encoded(text: str) -> str:
    return msgspec.json.encode(text.encode("utf-8", "replace")).decode().strip('"')


def tool_results(found: Input, pending: Sequence[Json]) -> list[Json]:
    offered = {call["callId"]: call for call in pending if call.get("state") == "CALL_STATE_OFFERED"}
    given: list[Json] = []
    for call_id, message in found.results.items():
        if call_id in offered:
            text = str(message.get("error") or "") or text_of(message)
            named = {"runId": offered[call_id]["runId"], "callId": call_id, "isError": bool(message.get("error"))}
            given.append(named | {"contentJson": encoded(_as_json(text))})
    return given


def _as_json(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text)
    return text


def interrupts(run: Json) -> list[Json]:
    """Return a run's interrupts, in order, based on its `pendingCalls` and budget."""
    found = [
        _approval(call) if call["state"] == "CALL_STATE_AWAITING_APPROVAL" else _question(call)
        for call in run.get("pendingCalls", ())
        if call.get("state") in {"CALL_STATE_AWAITING_APPROVAL", "CALL_STATE_ASKED"}
    ]
    # The run was topped up. If that is not enough, its worker will ask again.
    is_topped_up = run.get("waiting", {}).get("reason") == "WAIT_REASON_WORKER"
    if "WAIT_KIND_BUDGET" in run.get("waits", ()) and not is_topped_up:
        needed = int(run.get("tokensNeeded", "0"))
        found.append(
            {
                "id": f"budget.{run['runId']}.{run.get('tokenBudget', '0')}",
                "reason": "pawl:budget",
                "message": f"The token budget is exhausted. The run needs at least {needed} more tokens.",
                "responseSchema": {
                    "type": "object",
                    "properties": {"tokens": {"type": "integer", "minimum": max(needed, 1)}},
                    "required": ["tokens"],
                },
            }
        )
    return found


def _approval(call: Json) -> Json:
    asked = call.get("approval", {})
    shown = {"digest": asked.get("digest", ""), "arguments": arguments(call), "cause": asked.get("cause", "")}
    shown |= {"agent": visible(call["agentName"])} if call.get("agentName") else {}
    message = visible(asked.get("preview", "")) or f"Allow {call.get('toolName', '')} to run?"
    until = datetime.fromisoformat(call["deadlineTime"]) if call.get("deadlineTime") else None
    message += f"\n\n{undecided(until, is_extended=asked.get('escalated', False))}"
    return _interrupt(call, asked.get("digest", ""), "tool_call", message, _APPROVAL) | {"metadata": {"pawl": shown}}


def _question(call: Json) -> Json:
    asked = call.get("question", {})
    answer: Json = {"type": "string"} | ({"examples": asked["options"]} if asked.get("options") else {})
    schema: Json = {"type": "object", "properties": {"answer": answer}, "required": ["answer"]}
    if asked.get("answerSchemaJson"):
        schema = json.loads(decoded(asked["answerSchemaJson"]))
    text = visible(asked.get("question", ""))
    return _interrupt(call, _hash(text), "input_required", text, schema)


def _interrupt(call: Json, mark: str, reason: str, message: str, schema: Json) -> Json:
    """Return an interrupt. `mark` is part of the interrupt's id, and must change whenever the call changes."""
    named = {"id": f"{call['callId']}.{mark}", "reason": reason, "message": message, "toolCallId": call["callId"]}
    expires = {"expiresAt": call["deadlineTime"]} if call.get("deadlineTime") else {}
    return {**named, "responseSchema": schema, **expires}


def settled(interrupt_id: str, known: Mapping[str, Json]) -> str:
    call = known.get(interrupt_id.partition(".")[0], {})
    decision = call.get("approval", {}).get("decision", {})
    if who := decision.get("userId"):
        return f"{call.get('toolName', '')} was already decided by {who}: {_word(decision, 'kind', 'DECISION_KIND_')}."
    if call.get("state"):
        return f"{call.get('toolName', '')} was already settled: {_word(call, 'state', 'CALL_STATE_')}."
    return "This was already settled."


def _word(of: Json, name: str, prefix: str) -> str:
    return str(of.get(name, "")).removeprefix(prefix).lower().replace("_", " ")


class Answers(msgspec.Struct, frozen=True):
    """The requests that a resume contains: decisions on calls, tokens to add to runs, and runs to stop."""

    decisions: list[Json]
    tokens: dict[str, int]
    stops: list[str]
    # Interrupts that had already been settled.
    late: list[str]


def answers(resume: Sequence[Resume], run: Json, jobs: Sequence[Json], known: Mapping[str, Json]) -> Answers:
    """Convert answers to a thread's interrupts. The interrupts come from the thread's open run and its jobs.

    Interrupts of jobs may be left unanswered, because a job can ask at any time. `known` contains the calls of all
    these runs, by id.

    Raises:
        InvalidField: One of the run's interrupts is not answered, or is answered twice, or an answer is invalid.
        CallNotFound: An answered interrupt never existed.
        DigestMismatch: The call has changed since it was shown.
    """
    own = [each["id"] for each in interrupts(run)]
    asked = {*own, *(each["id"] for job in jobs for each in interrupts(job))}
    given = {each.interrupt_id: each for each in resume}
    if len(given) < len(resume):
        raise InvalidField("Answer each interrupt only once.", field="resume")
    missing = [name for name in own if name not in given and not _is_older(name, given)]
    if missing:
        raise InvalidField(f"Answer every interrupt. Missing: {', '.join(missing)}"[:500], field="resume")
    pending = {call["callId"]: call for each in (run, *jobs) for call in each.get("pendingCalls", ())}
    decisions: list[Json] = []
    tokens, stops, late = dict[str, int](), list[str](), list[str]()
    for name, each in given.items():
        call_id = name.partition(".")[0]
        if each.status not in {"resolved", "cancelled"}:
            raise InvalidField(f"The status of {name} must be resolved or cancelled.", field="resume")
        if name in asked and call_id == "budget":
            run_id = name.split(".")[1]
            if each.status == "cancelled":
                stops.append(run_id)
            else:
                tokens[run_id] = _tokens(each)
        elif name in asked:
            decisions.append(_decision(pending[call_id], each))
        elif call_id in pending:
            raise DigestMismatch(f"{call_id} has changed since it was shown. Reload the run.")
        elif call_id in known or call_id == "budget":
            late.append(name)
        else:
            raise CallNotFound(f"There is no interrupt {name[:200]} in this thread.")
    return Answers(decisions, tokens, stops, late)


def _is_older(name: str, given: Mapping[str, Resume]) -> bool:
    """Return whether the request answers another version of the interrupt, so that the mismatch can be reported."""
    return any(other.partition(".")[0] == name.partition(".")[0] != "budget" for other in given)


def _tokens(each: Resume) -> int:
    tokens = each.payload.get("tokens") if isinstance(each.payload, dict) else None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= _TOKENS_MAX:
        raise InvalidField(f'The payload for {each.interrupt_id} must be {{"tokens": NUMBER}}.', field="resume")
    return tokens


def _decision(call: Json, each: Resume) -> Json:
    asked = call.get("approval", {}).get("digest", "")
    named: Json = {"runId": call["runId"], "callId": call["callId"], "digest": asked}
    if each.status == "cancelled":
        return named | {"kind": "DECISION_KIND_REJECT", "reason": "The user did not answer."}
    if call["state"] == "CALL_STATE_ASKED":
        return named | {"kind": "DECISION_KIND_ANSWER", "answer": _answer(call, each)}
    value = each.payload if isinstance(each.payload, dict) else {}
    approved, reason, edited = value.get("approved"), value.get("reason") or "", value.get("editedArgs")
    if not isinstance(approved, bool) or not isinstance(reason, str) or not isinstance(edited, dict | None):
        form = '{"approved": true or false, "reason": text, "editedArgs": object}'
        raise InvalidField(f"The payload for {each.interrupt_id} must be {form}."[:500], field="resume")
    if not approved:
        return named | {"kind": "DECISION_KIND_REJECT", "reason": reason}
    if edited is None:
        return named | {"kind": "DECISION_KIND_APPROVE", "reason": reason}
    return named | {"kind": "DECISION_KIND_EDIT", "reason": reason, "argumentsJson": encoded(json.dumps(edited))}


def _answer(call: Json, each: Resume) -> str:
    payload, has_schema = each.payload, bool(call.get("question", {}).get("answerSchemaJson"))
    if isinstance(payload, dict) and len(payload) == 1 and (has_schema or "answer" in payload):
        payload = next(iter(payload.values()))
    text = payload if isinstance(payload, str) else json.dumps(payload) if has_schema else ""
    if not text:
        raise InvalidField(f'The payload for {each.interrupt_id} must be {{"answer": text}}.'[:500], field="resume")
    return text


def outcome(found: Input, run: Json, done: Collection[str] = ()) -> Json | None:
    """Return an AG-UI run's final event if the run has ended or is waiting for input. Otherwise, return None.

    `done` contains the interrupts and calls that were just answered.
    """
    finished: Json = {"type": "RUN_FINISHED", "threadId": found.thread_id, "runId": found.run_id}
    match run.get("state"):
        case "RUN_STATE_COMPLETED":
            return _completed(found, run, finished)
        case "RUN_STATE_CANCELLED" if not found.is_legacy:
            return finished | {"outcome": {"type": "cancelled"}}
        case "RUN_STATE_CANCELLED":
            return {"type": "RUN_ERROR", "message": "The run was stopped.", "code": "CANCELLED"}
        case "RUN_STATE_FAILED":
            failure = run.get("failure", {})
            return {"type": "RUN_ERROR", "message": failure.get("message", ""), "code": failure.get("reason", "FAILED")}
        case "RUN_STATE_EXPIRED":
            return {
                "type": "RUN_ERROR",
                "message": "The run expired without an answer.",
                "code": "EXPIRED",
            }
        case "RUN_STATE_WAITING":
            return _waiting(found, run, finished, done)
    return None


def _completed(found: Input, run: Json, finished: Json) -> Json:
    if found.is_legacy:
        return finished
    used = run.get("usage", {})
    usage: Json = {"model": run.get("options", {}).get("model", "")}
    for name in ("inputTokens", "outputTokens", "reasoningTokens", "cachedInputTokens"):
        usage[name] = int(used.get(name, "0"))
    return finished | {"outcome": {"type": "success"}, "usage": [usage]}


def _waiting(found: Input, run: Json, finished: Json, done: Collection[str]) -> Json | None:
    asked = [each for each in interrupts(run) if each["id"] not in done]
    if asked:
        return finished | {"outcome": {"type": "interrupt", "interrupts": asked}}
    offered = [call["callId"] for call in run.get("pendingCalls", ()) if call.get("state") == "CALL_STATE_OFFERED"]
    offered = [call_id for call_id in offered if call_id not in done]
    if not offered:
        return None
    return finished if found.is_legacy else finished | {"outcome": {"type": "success", "pendingToolCallIds": offered}}
