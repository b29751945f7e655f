"""The requests in a prompt: a few sentence patterns, recognised without any understanding.

A prompt is split at "then" and ";" into stages, done one after the other, and a stage at "and" into intents done side
by side, provided that every part is recognised by itself.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from pawl.model_server.cities import zone_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UseTool:
    """Needs a tool. `wish` completes "I was asked to ...". A name that ends in `*` stands for the first that fits.

    `background` holds the parameters by which the call runs in the background; empty if it does not.
    """

    tool: str
    wish: str
    values: Mapping[str, Any]
    wants_results: bool = False
    background: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddTask:
    """A task and its subtasks, created in one batch in which the subtasks name their parent by its title."""

    title: str
    subtasks: tuple[str, ...]
    project: str = ""
    tools: ClassVar = ("create_task", "add_subtask")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Needs no tool: text of a given kind and length, at a given pace."""

    topic: str
    length: int = 0
    chunk_delay: float = 0.0


Intent = UseTool | AddTask | Say
"""A part of a stage."""
Stage = tuple[Intent, ...]

_THEN = re.compile(r"\s*(?:;|,?\s*\b(?:and\s+)?then\b)[,:]?\s*", re.IGNORECASE)
_AND = re.compile(r"\s*,?\s+and\s+(?:also\s+)?", re.IGNORECASE)
_ADDRESS = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*"
_ADDRESSES = rf"{_ADDRESS}(?:\s*(?:,\s*(?:and\s+)?|\band\s+){_ADDRESS})*"
_ONE_TASK = r"(?:(?!\band\s+(?:also\s+)?(?:add|create)\b).)"
_ADD_TASK = (
    rf"(?:add|create) (?:a )?task\s+(?P<title>{_ONE_TASK}+?)(?:\s+in (?:the )?project\s+(?P<project>{_ONE_TASK}+?))?"
    r"(?:\s+with (?:the )?subtasks?:?\s+(?P<subtasks>.+))?"
)
_IN_BACKGROUND = (
    r"in the background(?:,? every (?P<every>\d+(?:\.\d+)?) ?s(?:econds?)?)?(?:,? (?P<times>\d+) times)?"
    r"(?:,? for (?P<minutes>\d+(?:\.\d+)?) minutes?)?[:,]\s*(?P<task>(?!in the background).+)"
)
_SUM = re.compile(r"(?=.*\d)[\d\s.,+\-*/()^%]+")
_SPOKEN = ((r"\btimes\b", "*"), (r"\bplus\b", "+"), (r"\bminus\b", "-"), (r"\bdivided by\b", "/"), (r"\bx\b", "*"))
_PACES = (("very slowly", 0.5), ("slowly", 0.1))
_OPTIONS = {
    "table": ("Tonight at 19:00", "Tomorrow at 19:00", "Another time"),
    "trip": ("A weekend away", "A week by the sea", "Something else"),
}
STORY_LINES = 120
COUNT_MAX = 10_000


def stages_of(prompt: str) -> list[Stage]:
    """Return the requests, stage by stage. Never empty: what is not recognised is something to talk about."""
    return [_stage(part) for part in _THEN.split(prompt.strip()) if part.strip(" .!?,")] or [(Say(topic="help"),)]


def _stage(text: str) -> Stage:
    text = text.strip()
    whole = _recognise(text)
    if whole is not None:
        return (whole,)
    parts = [_recognise(part) for part in _AND.split(text)]
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else (Say(topic="help"),)


def _recognise(text: str) -> Intent | None:
    words = re.sub(r"^(?:please|can you|could you|would you)\s+", "", text.strip(), flags=re.IGNORECASE)
    for pattern, build in _PATTERNS:
        match = pattern.fullmatch(words.rstrip(" ."))
        intent = build(match) if match else None
        if intent is not None:
            return intent
    return None


def _sum(match: re.Match[str]) -> Intent | None:
    expression = match["sum"]
    for spoken, sign in _SPOKEN:
        expression = re.sub(spoken, sign, expression, flags=re.IGNORECASE)
    expression = expression.strip(" ?=").replace("^", "**").replace(",", "")
    if not _SUM.fullmatch(expression) or not re.search(r"[+\-*/%]|^\d+$", expression):
        return None
    return UseTool(tool="calculate", wish=f"work out {expression}", values={"expression": expression})


def _time(match: re.Match[str]) -> Intent:
    place = (match["place"] or "UTC").strip(" ?")
    zone = zone_of(place)
    if zone is None:
        return _question(f"Which time zone is {place} in?", f"I do not know where {place} is.")
    return UseTool(tool="get_current_time", wish=f"say what time it is in {place}", values={"timezone": zone})


def _email(match: re.Match[str]) -> Intent:
    subject, body = _letter((match["rest"] or "").strip())
    to = re.findall(_ADDRESS, match["to"])
    values = {"to": to if len(to) > 1 else to[0], "subject": subject, "body": body}
    wish = f"e-mail {', '.join(to)}"
    return UseTool(tool="send_email", wish=wish, values=values, wants_results=_means_results(body))


def _letter(rest: str) -> tuple[str, str]:
    """Finds subject and body in "about S: B", "about S saying B", "saying B" or anything else."""
    full = re.fullmatch(
        r"about\s+(?P<s>.+?)(?:\s*:\s*|,?\s+(?:saying|and say)\s+(?:that\s+)?)(?P<b>.+)", rest, re.DOTALL
    )
    if full:
        return _unquoted(full["s"]), _unquoted(full["b"])
    about = re.fullmatch(r"about\s+(.+)", rest, re.DOTALL)
    if about:
        return _unquoted(about[1]), f"This is about {_unquoted(about[1])}."
    body = _unquoted(re.sub(r"^(?:saying|to say|that|and say|:|,)\s*(?:that\s+)?", "", rest)) or "Hello."
    return " ".join(body.split()[:6]).rstrip(".,!"), body


def _means_results(body: str) -> bool:
    return (
        re.fullmatch(r"(?:with\s+)?(?:it|that|this|the (?:results?|answers?|times?))", body, re.IGNORECASE) is not None
    )


def _task(match: re.Match[str]) -> Intent:
    names = re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", match["subtasks"] or "")
    return AddTask(
        title=_unquoted(match["title"]),
        subtasks=tuple(_unquoted(name) for name in names if name.strip()),
        project=_unquoted(match["project"] or ""),
    )


def _show(match: re.Match[str]) -> Intent:
    what = match["what"].strip()
    return UseTool(tool="show*", wish=f"show {what}", values={"title": what, "text": what})


def _vague(match: re.Match[str]) -> Intent | None:
    text = match[0]
    if re.search(r"\d", text):
        return None
    options = next((choice for word, choice in _OPTIONS.items() if word in text), ("Today", "Tomorrow", "Next week"))
    return _question(
        f"You asked to {text}. What do you have in mind?", "The request leaves out when and what.", *options
    )


def _ask(match: re.Match[str]) -> Intent:
    question = _unquoted(match["question"]).rstrip("?")
    if match["whether"]:
        return _question(
            f"{question[:1].upper()}{question[1:]}?", "I was told to ask.", "Yes", "No", kind="confirmation"
        )
    return _question(f"{question[:1].upper()}{question[1:]}?", "I was told to ask.")


def _question(question: str, why: str, *options: str, kind: str = "clarification") -> UseTool:
    values = {"question": question, "why": why, "kind": kind, "options": list(options)}
    return UseTool(tool="ask_user", wish=f'ask "{question}"', values=values)


def _agent(match: re.Match[str]) -> Intent:
    task = _unquoted(match["task"])
    return UseTool(tool="run_agent", wish=f"ask an agent to {task}", values={"task": task})


def _list(match: re.Match[str]) -> Intent:
    what = match["what"].lower()
    return UseTool(tool=f"list_{what}", wish=f"list {what}", values={})


def _direct(match: re.Match[str]) -> Intent | None:
    name, text = match["name"], match["arguments"]
    if "_" not in name and text is None:
        return None
    try:
        values = json.loads(text or "{}")
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    # No tool declares them.
    background = {key: values.pop(key) for key in list(values) if key.startswith("_")}
    return UseTool(tool=name, wish=f"call {name}", values=values, background=background)


def _in_background(match: re.Match[str]) -> Intent | None:
    intent = _recognise(match["task"])
    if not isinstance(intent, UseTool):
        return None
    wished = {"_interval": match["every"], "_stopAfter": match["times"], "_duration": match["minutes"]}
    parameters = {name: float(text) if "." in text else int(text) for name, text in wished.items() if text}
    return dataclasses.replace(intent, background={"_executeAsync": True, **parameters, **intent.background})


def _pace(text: str) -> float:
    return next((delay for word, delay in _PACES if word in text.lower()), 0.0)


def _story(match: re.Match[str]) -> Intent:
    return Say(topic="story", length=STORY_LINES, chunk_delay=_pace(match[0]))


def _count(match: re.Match[str]) -> Intent:
    return Say(topic="count", length=min(int(match["last"][:9]), COUNT_MAX), chunk_delay=_pace(match[0]))


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'“”").strip()


_PATTERNS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Intent | None]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), build)
    for pattern, build in (
        (_IN_BACKGROUND, _in_background),
        (r"(?:what(?:'s| is)|calculate|compute|work out|how much is)\s+(?P<sum>.+)", _sum),
        (r"(?:what(?:'s| is)? )?(?:the )?(?:current )?time(?: is it)?(?: now)?(?:\s+in\s+(?P<place>.+?))?\??", _time),
        (rf"(?:send (?:an )?e-?mail to|e-?mail|mail|write to)\s+(?P<to>{_ADDRESSES})(?:[\s,:]+(?P<rest>.*))?", _email),
        (
            r"(?:send an e-?mail|e-?mail|mail|write to)\b.*",
            lambda m: _question("To which address?", f'"{m[0]}" names none.'),
        ),
        (_ADD_TASK, _task),
        (r"show(?:\s+me)?\s+(?P<what>.+)", _show),
        (r"(?:ask|let) an agent(?: to|:)?\s+(?P<task>.+)", _agent),
        (r"ask me(?:\s+(?P<whether>whether|if))?\s+(?P<question>.+)", _ask),
        (r"list (?:my |all |the )*(?P<what>\w+)", _list),
        (r"(?:call|use|run)\s+(?:the tool\s+)?(?P<name>[\w-]+)(?:\s+with)?\s*(?P<arguments>\{.*\})?", _direct),
        (r"(?:(?:very )?slowly,? )?tell me a(?: very)?(?: long)? story.*", _story),
        (r"(?:(?:very )?slowly,? )?count (?:very slowly |slowly )?(?:up )?to (?P<last>\d+).*", _count),
        (r"(?:book|plan|arrange|organi[sz]e|reserve|schedule)\s+.+", _vague),
        (r"(?:who|what) are you\??|are you .*", lambda _: Say(topic="self")),
        (r"(?:hello|hi|hey|good (?:morning|evening))\b.*", lambda _: Say(topic="greeting")),
    )
)
