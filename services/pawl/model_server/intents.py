"""Recognises the requests in a prompt with a few sentence patterns.

"then" and ";" split a prompt into sequential stages. "and" splits a stage into concurrent parts if each part is
recognised on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import zoneinfo
from typing import TYPE_CHECKING, Any

from pawl.model_server.wire import MODEL_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_REGIONS = {"Europe", "America", "Asia", "Africa", "Australia", "Pacific", "Atlantic", "Indian", "Antarctica", "Arctic"}
_ALSO = {
    "bangalore": "Asia/Kolkata",
    "barcelona": "Europe/Madrid",
    "beijing": "Asia/Shanghai",
    "bergen": "Europe/Oslo",
    "boston": "America/New_York",
    "cologne": "Europe/Berlin",
    "delhi": "Asia/Kolkata",
    "edinburgh": "Europe/London",
    "frankfurt": "Europe/Berlin",
    "geneva": "Europe/Zurich",
    "gmt": "Etc/GMT",
    "hamburg": "Europe/Berlin",
    "kyoto": "Asia/Tokyo",
    "milan": "Europe/Rome",
    "mumbai": "Asia/Kolkata",
    "munich": "Europe/Berlin",
    "new delhi": "Asia/Kolkata",
    "nyc": "America/New_York",
    "osaka": "Asia/Tokyo",
    "rio de janeiro": "America/Sao_Paulo",
    "san francisco": "America/Los_Angeles",
    "seattle": "America/Los_Angeles",
    "utc": "UTC",
    "washington": "America/New_York",
}


def zone_of(name: str) -> str | None:
    """Return the IANA zone of a city or zone name ("Oslo", "new york", "Europe/Oslo"), or None if unknown."""
    return _zones().get(" ".join(name.lower().replace("_", " ").split()))


@functools.cache
def _zones() -> dict[str, str]:
    zones: dict[str, str] = {}
    for zone in sorted(zoneinfo.available_timezones()):
        spoken = zone.lower().replace("_", " ")
        zones.setdefault(spoken, zone)
        if "/" in zone and zone.split("/")[0] in _REGIONS:
            zones.setdefault(spoken.rsplit("/", 1)[-1], zone)
    return zones | _ALSO


SELF = f"I am {MODEL_ID}: a rule-based stand-in for a language model, with sentence patterns instead of understanding."
HELP = (
    f"{SELF} Try: what is 17 * 23; what time is it in Oslo; e-mail ann@example.com about lunch; add task Party with "
    "subtasks Cake and Music; show the plan; book a table; tell me a long story slowly; call some_tool with {}. "
    'Join several with "then".'
)
STORY_LINES = 120
COUNT_MAX = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UseTool:
    """A request that needs a tool. `task` completes "I was asked to ...".

    A name that ends in `*` matches the first tool with that prefix.
    """

    tool: str
    task: str
    values: Mapping[str, Any]
    wants_results: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A request that does not need a tool. The reply is text, sent at a certain speed."""

    text: str
    chunk_delay: float = 0.0


# A part of a stage.
Intent = UseTool | Say
Stage = tuple[Intent, ...]

_THEN = re.compile(r"\s*(?:;|,?\s*\b(?:and\s+)?then\b)[,:]?\s*", re.IGNORECASE)
_AND = re.compile(r"\s*,?\s+and\s+(?:also\s+)?", re.IGNORECASE)
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
_RESULTS = re.compile(r"(?:with\s+)?(?:it|that|this|the (?:results?|answers?|times?))", re.IGNORECASE)
_STORY = (
    "the wheel turned,",
    "the pawl fell into the next tooth,",
    "the rope pulled back,",
    "nothing that was won was lost again,",
    "and the night was long while",
)


def stages_of(prompt: str) -> list[Stage]:
    """Return the requests by stage. For an unrecognised prompt, return a single reply that explains this."""
    return [_stage(part) for part in _THEN.split(prompt.strip()) if part.strip(" .!?,")] or [(_unknown(prompt),)]


def _stage(text: str) -> Stage:
    parts = [_recognise(text)]
    if not parts[0]:
        parts = [_recognise(part) for part in _AND.split(text)]
    return tuple(intent for part in parts for intent in part) if all(parts) else (_unknown(text),)


def _unknown(text: str) -> Say:
    return Say(text=f'I have no rule for "{text[:200]}". {HELP}')


def _recognise(text: str) -> Stage:
    words = re.sub(r"^(?:please|can you|could you|would you)\s+", "", text.strip(), flags=re.IGNORECASE)
    for pattern, build in _PATTERNS:
        match = pattern.fullmatch(words.rstrip(" ."))
        if match and (found := build(match)):
            return found
    return ()


def _sum(match: re.Match[str]) -> Stage:
    expression = match["sum"].strip(" ?=").replace("^", "**").replace(",", "")
    if not _SUM.fullmatch(expression) or not re.search(r"[+\-*/%]|^\d+$", expression):
        return ()
    return (UseTool(tool="calculate", task=f"work out {expression}", values={"expression": expression}),)


def _time(match: re.Match[str]) -> Stage:
    city = (match["place"] or "UTC").strip(" ?")
    zone = zone_of(city)
    if zone is None:
        return _question(f"Which time zone is {city} in?", f"I do not know where {city} is.")
    return (UseTool(tool="get_current_time", task=f"say what time it is in {city}", values={"timezone": zone}),)


def _email(match: re.Match[str]) -> Stage:
    to, rest = match["to"], (match["rest"] or "").strip()
    if not to:
        return _question("To which address?", f'"{match[0]}" does not contain an address.')
    if rest.startswith("about "):
        subject, _, body = rest.removeprefix("about ").partition(":")
        body = body.strip() or f"This is about {subject}."
    else:
        body = re.sub(r"^(?:saying|that|:|,)\s*", "", rest) or "Hello."
        subject = " ".join(body.split()[:6])
    values = {"to": to, "subject": subject, "body": body}
    wants_results = _RESULTS.fullmatch(body) is not None
    return (UseTool(tool="send_email", task=f"e-mail {to}", values=values, wants_results=wants_results),)


def _task(match: re.Match[str]) -> Stage:
    title, project = match["title"].strip(" \"'"), match["project"]
    values = {"title": title} | ({"project": project} if project else {})
    task = UseTool(tool="create_task", task=f'add the task "{title}"', values=values)
    names = [name for name in re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", match["subtasks"] or "") if name]
    subtasks = (
        UseTool(tool="add_subtask", task=f'add the subtask "{name}"', values={"parent": title, "title": name})
        for name in names
    )
    return (task, *subtasks)


def _show(match: re.Match[str]) -> Stage:
    what = match["what"].strip()
    return (UseTool(tool="show*", task=f"show {what}", values={"title": what, "text": what}),)


def _vague(match: re.Match[str]) -> Stage:
    if re.search(r"\d", match[0]):
        return ()
    options = ("Tonight at 19:00", "Tomorrow at 19:00", "Another time")
    why = "The request does not say when and what."
    return _question(f"You asked to {match[0]}. What do you have in mind?", why, *options)


def _ask(match: re.Match[str]) -> Stage:
    question = match["question"].strip(" ?\"'")
    options = ("Yes", "No") if match["whether"] else ()
    return _question(f"{question[:1].upper()}{question[1:]}?", "The request asks for a question.", *options)


def _question(question: str, why: str, *options: str) -> Stage:
    kind = "confirmation" if options == ("Yes", "No") else "clarification"
    values = {"question": question, "why": why, "kind": kind, "options": list(options)}
    return (UseTool(tool="ask_user", task=f'ask "{question}"', values=values),)


def _direct(match: re.Match[str]) -> Stage:
    name, text = match["name"], match["arguments"]
    if "_" not in name and text is None:
        return ()
    try:
        values = json.loads(text or "{}")
    except ValueError:
        return ()
    return (UseTool(tool=name, task=f"call {name}", values=values),)


def _in_background(match: re.Match[str]) -> Stage:
    found = _recognise(match["task"])
    if not found or not isinstance(found[0], UseTool):
        return ()
    asked = {"_interval": match["every"], "_stopAfter": match["times"], "_duration": match["minutes"]}
    parameters = {name: json.loads(text) for name, text in asked.items() if text}
    return (dataclasses.replace(found[0], values={"_executeAsync": True, **parameters, **found[0].values}),)


def _pace(text: str) -> float:
    return 0.5 if "very slowly" in text.lower() else 0.1 if "slowly" in text.lower() else 0.0


def _story(match: re.Match[str]) -> Stage:
    lines = " ".join(_STORY[n % len(_STORY)] for n in range(STORY_LINES))
    return (Say(text=f"Once upon a time {lines} it was morning. The end.", chunk_delay=_pace(match[0])),)


def _count(match: re.Match[str]) -> Stage:
    last = min(int(match["last"][:9]), COUNT_MAX)
    return (Say(text=" ".join(map(str, range(1, last + 1))), chunk_delay=_pace(match[0])),)


_PATTERNS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Stage]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), build)
    for pattern, build in (
        (_IN_BACKGROUND, _in_background),
        (r"(?:what(?:'s| is)|calculate|compute|work out|how much is)\s+(?P<sum>.+)", _sum),
        (r"(?:what(?:'s| is)? )?(?:the )?(?:current )?time(?: is it)?(?: now)?(?:\s+in\s+(?P<place>.+?))?\??", _time),
        (r"(?:e-?mail|mail|write to)\b\s*(?P<to>[\w.+-]+@[\w-]+(?:\.[\w-]+)*)?(?:[\s,:]+(?P<rest>.*))?", _email),
        (_ADD_TASK, _task),
        (r"show(?:\s+me)?\s+(?P<what>.+)", _show),
        (r"ask me(?:\s+(?P<whether>whether|if))?\s+(?P<question>.+)", _ask),
        (r"(?:call|use|run)\s+(?:the tool\s+)?(?P<name>[\w-]+)(?:\s+with)?\s*(?P<arguments>\{.*\})?", _direct),
        (r"(?:(?:very )?slowly,? )?tell me a(?: very)?(?: long)? story.*", _story),
        (r"(?:(?:very )?slowly,? )?count (?:very slowly |slowly )?(?:up )?to (?P<last>\d+).*", _count),
        (r"(?:book|plan|arrange|organi[sz]e|reserve|schedule)\s+.+", _vague),
        (r"(?:who|what) are you\??|are you .*", lambda _: (Say(text=SELF),)),
        (r"(?:hello|hi|hey|good (?:morning|evening))\b.*", lambda _: (Say(text=f"Hello. {HELP}"),)),
    )
)
