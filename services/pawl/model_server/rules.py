"""The rules: which reply the prompt, the offered tools and the results so far call for. Pure, and without memory.

Stages with tools take one round each. What was already done is read from the messages, so the same messages always give
the same reply, whoever asks and however often.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pawl.model_server.forms import filled
from pawl.model_server.intents import AddTask, Say, UseTool, stages_of
from pawl.model_server.outcome import describe, failure, job_id, note, told
from pawl.model_server.reply import Reply, ToolCall
from pawl.model_server.wire import MODEL_ID

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pawl.model_server.intents import Intent, Stage
    from pawl.model_server.request import ChatRequest, Result, Tool

SELF = f"I am {MODEL_ID}: a rule-based stand-in for a language model, with sentence patterns instead of understanding."
HELP = (
    f"{SELF} Try: what is 17 * 23; what time is it in Oslo; e-mail ann@example.com about lunch; add task Party with "
    "subtasks Cake and Music; show the plan; book a table; tell me a long story slowly; call some_tool with {}. "
    'Join several with "then".'
)
_STORY = (
    "the wheel turned,",
    "the pawl fell into the next tooth,",
    "the rope pulled back,",
    "nothing that was won was lost again,",
    "and the night was long while",
)
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "expression": ("expression", "formula", "input"),
    "timezone": ("timezone", "time_zone", "zone", "tz", "zone_name"),
    "to": ("to", "recipient", "recipients", "address"),
    "body": ("body", "text", "message", "content"),
    "title": ("title", "name", "task", "query", "what", "subject"),
    "parent": ("parent", "parent_title", "task", "task_title", "parent_task", "parent_id", "task_id", "parent_ref"),
    "question": ("question", "prompt", "text"),
    "task": ("task", "prompt", "text"),
    "options": ("options", "choices"),
}


def reply_for(request: ChatRequest) -> Reply:
    """The reply to a request."""
    if request.asks_title:
        return Reply(text=f'"About: {request.prompt.partition(":")[2].strip().partition(chr(10))[0]}"')
    if request.notices and not request.prompt.strip():
        return Reply(reasoning="Jobs have told something.", text="\n\n".join(map(told, request.notices)))
    stages = stages_of(request.prompt)
    done = _done(stages, request.results())
    first_open = max(done, default=-1) + 1
    for number in range(first_open, len(stages)):
        calls = tuple(_calls(stages[number], request, _summary(stages, done)))
        if calls:
            return _call_reply(request, stages, range(first_open, number), calls, number)
    forced = request.tool(request.forced_tool or "")
    if forced is not None and request.round == 0:
        call = ToolCall(name=forced.name, arguments=_fit(forced, {}, request.prompt))
        return Reply(reasoning=f"I was told to call {forced.name}.", tool_calls=(call,))
    return _final_reply(request, stages, done, first_open)


def _call_reply(
    request: ChatRequest, stages: Sequence[Stage], before: range, calls: tuple[ToolCall, ...], number: int
) -> Reply:
    spoken = [intent for position in before for intent in stages[position] if isinstance(intent, Say)]
    names = ", ".join(call.name for call in calls)
    return Reply(
        reasoning=f'The prompt is "{request.prompt[:200]}". Stage {number + 1} of {len(stages)} needs {names}.',
        text="\n\n".join([*(_say(intent, request) for intent in spoken), "Let me do that."]),
        tool_calls=calls,
        chunk_delay=max((intent.chunk_delay for intent in spoken), default=0.0),
    )


def _final_reply(
    request: ChatRequest, stages: Sequence[Stage], done: Mapping[int, Sequence[Result]], first_open: int
) -> Reply:
    parts = [told(notice) for notice in request.notices]
    delay = 0.0
    for number, stage in enumerate(stages):
        if number in done:
            parts.extend(_outcomes(stage, done[number]))
            continue
        for intent in stage:
            if not isinstance(intent, Say):
                parts.append(_not_offered(intent, request))
            elif number >= first_open:
                parts.append(_say(intent, request))
                delay = max(delay, intent.chunk_delay)
    if request.answer_schema is not None:
        parts = [json.dumps(filled(request.answer_schema, "\n\n".join(parts)), ensure_ascii=False)]
    reasoning = "Every stage is done; I report the results." if done else "The prompt needs no tool, or none that fits."
    return Reply(reasoning=reasoning, text="\n\n".join(parts), chunk_delay=delay)


def _done(stages: Sequence[Stage], results: Sequence[Result]) -> dict[int, list[Result]]:
    """Assigns each round of calls so far to the stage it was made for, by the names of the tools."""
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


def _is_for(name: str, intent: Intent) -> bool:
    match intent:
        case UseTool(tool=tool):
            return name.startswith(tool[:-1]) if tool.endswith("*") else name == tool
        case Say():
            return False
        case AddTask():
            return name in AddTask.tools


def _calls(stage: Stage, request: ChatRequest, so_far: str) -> Iterator[ToolCall]:
    for intent in stage:
        match intent:
            case UseTool():
                tool = _offered(intent.tool, request)
                values = {**intent.values, "body": so_far} if intent.wants_results and so_far else intent.values
                if tool is not None:
                    arguments = {**_fit(tool, values, intent.wish), **intent.background}
                    yield ToolCall(name=tool.name, arguments=arguments)
            case AddTask():
                create, add = request.tool("create_task"), request.tool("add_subtask")
                if create is not None:
                    values = {"title": intent.title} | ({"project": intent.project} if intent.project else {})
                    yield ToolCall(name=create.name, arguments=_fit(create, values, intent.title))
                for name in intent.subtasks if create is not None and add is not None else ():
                    values = {"parent": intent.title, "title": name}
                    yield ToolCall(name="add_subtask", arguments=_fit(add, values, name))
            case Say():
                pass


def _offered(name: str, request: ChatRequest) -> Tool | None:
    if not name.endswith("*"):
        return request.tool(name)
    fitting = (request.tool(tool.name) for tool in request.tools if tool.name.startswith(name[:-1]))
    return next(fitting, None)


def _fit(tool: Tool | None, values: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Puts the values under the names the tool's schema uses and fills in what else it requires."""
    if tool is None or not tool.properties:
        return dict(values)
    fitted: dict[str, Any] = {}
    for name, value in values.items():
        known = (alias for alias in (name, *_ALIASES.get(name, ())) if alias in tool.properties and alias not in fitted)
        target = next(known, None)
        if target is not None:
            fitted[target] = _as_wanted(value, tool.properties[target])
    for name in tool.required:
        fitted.setdefault(name, _filler(tool.properties.get(name, {}), text))
    return fitted


def _as_wanted(value: Any, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "array":
        return value if isinstance(value, list) else [value]
    return ", ".join(value) if isinstance(value, list) and schema.get("type") == "string" else value


def _filler(schema: Mapping[str, Any], text: str) -> Any:
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    fillers: dict[str, Any] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}, "null": None}
    kind = schema.get("type")
    return fillers.get(kind, text) if isinstance(kind, str) else text


def _summary(stages: Sequence[Stage], done: Mapping[int, Sequence[Result]]) -> str:
    return " ".join(line for number in done for line in _outcomes(stages[number], done[number]))


def _outcomes(stage: Stage, results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        wish = next((_wish(intent) for intent in stage if _is_for(result.name, intent)), f"call {result.name}")
        yield _outcome(result, wish) + note(result.content)


def _outcome(result: Result, wish: str) -> str:
    refused = failure(result.content)
    if refused is not None:
        return f"I could not {wish} ({result.name}): {refused}"
    job = job_id(result.content)
    if job:
        return f"I have begun in the background to {wish}, with the job {job}."
    said = describe(result.content)
    if result.name == "calculate":
        return f"{wish.removeprefix('work out ')} = {said}."
    if result.name == "ask_user":
        return f'You answered "{said}"; I have no rule that does more with it.'
    if result.name in ("create_task", "add_subtask"):
        return f"{result.name} {_title(result)}: {said}"
    return f"I was asked to {wish}; {result.name} says: {said}"


def _title(result: Result) -> str:
    try:
        arguments = json.loads(result.arguments)
    except ValueError:
        return ""
    return f'"{arguments.get("title", "")}"' if isinstance(arguments, dict) else ""


def _wish(intent: Intent) -> str:
    match intent:
        case UseTool(wish=wish):
            return wish
        case AddTask(title=title):
            return f'add the task "{title}"'
        case Say(topic=topic):
            return topic


def _not_offered(intent: UseTool | AddTask, request: ChatRequest) -> str:
    tool = intent.tool if isinstance(intent, UseTool) else intent.tools[0]
    if tool == "ask_user" and isinstance(intent, UseTool):
        return str(intent.values["question"])
    if not request.tools or request.tool_choice == "none":
        return f"I could not {_wish(intent)}: no tools are offered for this answer."
    return f"I could not {_wish(intent)}: the tool {tool} is not offered to me."


def _say(intent: Say, request: ChatRequest) -> str:
    if intent.topic == "story":
        lines = (_STORY[n % len(_STORY)] for n in range(intent.length))
        return f"Once upon a time {' '.join(lines)} it was morning. The end."
    if intent.topic == "count":
        return " ".join(str(number) for number in range(1, intent.length + 1))
    if intent.topic == "self":
        return SELF
    if intent.topic == "greeting":
        return f"Hello. {HELP}"
    return f'I have no rule for "{request.prompt[:200]}". {HELP}'
