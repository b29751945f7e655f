"""Rules that choose a reply from the prompt, the offered tools and the results so far. Pure and stateless.

Each stage with tools takes one round. The messages alone show which stages are done, so that the same messages always
get the same reply.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pawl.model_server.intents import Say, UseTool, stages_of
from pawl.model_server.script import Reply, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pawl.model_server.intents import Stage
    from pawl.model_server.request import ChatRequest, Result, Tool


_DEPTH_MAX = 16


def filled(schema: Any, text: str, depth: int = _DEPTH_MAX) -> Any:
    """Return a value that matches a schema, with `text` for every string. References are not followed."""
    if not isinstance(schema, dict) or not depth:
        return text
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return filled(schema["anyOf"][0], text, depth - 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            return {name: filled(value, text, depth - 1) for name, value in schema.get("properties", {}).items()}
        case "array":
            return [filled(schema.get("items"), text, depth - 1)] * int(schema.get("minItems", 0))
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
    return text[: schema.get("maxLength")]


_SUMMARY_KEYS = ("result", "answer", "text", "time", "message")
_TEXT_MAX = 2_000


def describe(content: str | None) -> str:
    if content is None:
        return "nothing yet"
    value = _parse(content)
    for _ in range(2):
        if isinstance(value, dict):
            value = next((value[key] for key in _SUMMARY_KEYS if value.get(key) is not None), value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:_TEXT_MAX]


def job_id(content: str | None) -> str:
    """Return the id, found in a call's result, of the job that continues the call, or "" if there is no such job."""
    value = _field(content, "result") or _parse(content or "")
    return str(value.get("job_id", "")) if isinstance(value, dict) else ""


def notice_text(notice: Mapping[str, Any]) -> str:
    job = f"The {notice.get('tool')} job"
    outcome = notice.get("error") or describe(json.dumps(notice["result"]) if "result" in notice else None)
    outcome = outcome.removesuffix(".")
    if "report" in notice:
        done = f"{notice['percent']}% done" if "percent" in notice else f"running for {notice.get('minutes')} minutes"
        return f"{job} is {done}: {notice['progress']}." if "progress" in notice else f"{job} is {done}."
    if "iteration" in notice:
        return f"{job}, iteration {notice['iteration']}: {outcome}."
    if notice.get("state") == "CANCELLED":
        return f"{job} was stopped."
    return f"{job} has {str(notice.get('state')).lower()}: {outcome}."


def note(content: str | None) -> str:
    """Return a result's note as ` (note)`, or "" if it has none. It may say that a reviewer edited the call."""
    text = _field(content, "note")
    return f" ({text})" if text else ""


def failure(content: str | None) -> str | None:
    error = _field(content, "error")
    if isinstance(error, dict):
        error = error.get("message", error)
    return None if error is None else str(error)[:_TEXT_MAX]


def _field(content: str | None, name: str) -> Any:
    value = _parse(content or "")
    return value.get(name) if isinstance(value, dict) else None


def _parse(content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content


def reply_for(request: ChatRequest) -> Reply:
    if request.asks_title:
        return Reply(text=f'"About: {request.prompt.partition(":")[2].strip().partition(chr(10))[0]}"')
    if request.notices and not request.prompt.strip():
        return Reply(reasoning="Jobs have reported something.", text="\n\n".join(map(notice_text, request.notices)))
    stages = stages_of(request.prompt)
    done = _done(stages, request.results())
    first_open = max(done, default=-1) + 1
    for number in range(first_open, len(stages)):
        so_far = " ".join(line for stage in done for line in _outcomes(stages[stage], done[stage]))
        calls = tuple(_calls(stages[number], request, so_far))
        if calls:
            return _call_reply(request, stages, range(first_open, number), calls, number)
    forced = request.tool(request.forced_tool or "")
    if forced is not None and request.round == 0:
        call = ToolCall(name=forced.name, arguments=_fit(forced, {}, request.prompt))
        return Reply(reasoning=f"The request requires a call to {forced.name}.", tool_calls=(call,))
    return _final_reply(request, stages, done, first_open)


def _call_reply(
    request: ChatRequest, stages: Sequence[Stage], before: range, calls: tuple[ToolCall, ...], number: int
) -> Reply:
    spoken = [intent for position in before for intent in stages[position] if isinstance(intent, Say)]
    names = ", ".join(call.name for call in calls)
    return Reply(
        reasoning=f'The prompt is "{request.prompt[:200]}". Stage {number + 1} of {len(stages)} needs {names}.',
        text="\n\n".join([*(intent.text for intent in spoken), "Let me do that."]),
        tool_calls=calls,
        chunk_delay=max((intent.chunk_delay for intent in spoken), default=0.0),
    )


def _final_reply(
    request: ChatRequest, stages: Sequence[Stage], done: Mapping[int, Sequence[Result]], first_open: int
) -> Reply:
    parts = [notice_text(notice) for notice in request.notices]
    delay = 0.0
    for number, stage in enumerate(stages):
        if number in done:
            parts.extend(_outcomes(stage, done[number]))
            continue
        for intent in stage:
            if isinstance(intent, UseTool):
                parts.append(_not_offered(intent, request))
            elif number >= first_open:
                parts.append(intent.text)
                delay = max(delay, intent.chunk_delay)
    if request.answer_schema is not None:
        parts = [json.dumps(filled(request.answer_schema, "\n\n".join(parts)), ensure_ascii=False)]
    reasoning = "Every stage is done; I report the results." if done else "The prompt needs no tool, or none that fits."
    return Reply(reasoning=reasoning, text="\n\n".join(parts), chunk_delay=delay)


def _done(stages: Sequence[Stage], results: Sequence[Result]) -> dict[int, list[Result]]:
    """Return the results of each stage that is done. Rounds of calls are matched to stages by tool names."""
    done: dict[int, list[Result]] = {}
    position = 0
    for round_number in sorted({result.round for result in results}):
        made = [result for result in results if result.round == round_number]
        for number in range(position, len(stages)):
            if any(_is_for(result.name, intent) for result in made for intent in stages[number]):
                done[number] = made
                position = number + 1
                break
    return done


def _is_for(name: str, intent: UseTool | Say) -> bool:
    if isinstance(intent, Say):
        return False
    return name.startswith(intent.tool[:-1]) if intent.tool.endswith("*") else name == intent.tool


def _calls(stage: Stage, request: ChatRequest, so_far: str) -> Iterator[ToolCall]:
    for intent in stage:
        tool = request.tool(intent.tool) if isinstance(intent, UseTool) else None
        if isinstance(intent, UseTool) and tool is not None:
            values = {**intent.values, "body": so_far} if intent.wants_results and so_far else intent.values
            yield ToolCall(name=tool.name, arguments=_fit(tool, values, intent.task))


def _fit(tool: Tool, values: Mapping[str, Any], text: str) -> dict[str, Any]:
    declared = tool.parameters.properties
    fitted = {name: value for name, value in values.items() if not declared or name in declared or name[0] == "_"}
    for name, value in fitted.items():
        schema = declared.get(name)
        if isinstance(schema, dict) and schema.get("type") == "array" and not isinstance(value, list):
            fitted[name] = [value]
    for name in tool.parameters.required:
        fitted.setdefault(name, filled(declared.get(name), text))
    return fitted


def _outcomes(stage: Stage, results: Sequence[Result]) -> Iterator[str]:
    wanted = [intent for intent in stage if isinstance(intent, UseTool)]
    for result in results:
        intent = next((each for each in wanted if _is_for(result.name, each)), None)
        if intent is not None:
            wanted.remove(intent)
        yield _outcome(result, intent.task if intent else f"call {result.name}") + note(result.content)


def _outcome(result: Result, task: str) -> str:
    refused = failure(result.content)
    if refused is not None:
        return f"I could not {task} ({result.name}): {refused}"
    job = job_id(result.content)
    if job:
        return f"I started a background job to {task}: {job}."
    text = describe(result.content)
    if result.name == "calculate":
        return f"{task.removeprefix('work out ')} = {text}."
    if result.name == "ask_user":
        return f'You answered "{text}"; I have no rule that uses the answer.'
    return f"I was asked to {task}; {result.name} returned: {text}"


def _not_offered(intent: UseTool, request: ChatRequest) -> str:
    if intent.tool == "ask_user":
        return str(intent.values["question"])
    if not request.offered:
        return f"I could not {intent.task}: no tools are offered for this answer."
    return f"I could not {intent.task}: the tool {intent.tool} is not offered to me."
