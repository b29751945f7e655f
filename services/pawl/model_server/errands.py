"""Work that takes several rounds: each next call follows from the results of the ones before."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pawl.model_server.intents import CompleteTasks, UpdateProject
from pawl.model_server.outcome import describe, failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pawl.model_server.intents import Intent
    from pawl.model_server.request import Result

_PROJECT_ID = re.compile(r"\bproj_[a-z0-9]+\b")
_QUOTED = re.compile(r"(?P<quote>['\"])(?P<title>.+?)(?P=quote)")
_DONE = ("done", "completed", "complete")

Call = tuple[str, dict[str, Any]]
"""Name of a tool, and arguments."""


def next_call(intent: Intent, results: Sequence[Result]) -> Call | None:
    """The next call of an errand, given what came of those so far; None if it has come to its end."""
    match intent:
        case UpdateProject():
            return _update(intent, results)
        case CompleteTasks():
            return _complete(intent, results)
        case _:
            return None


def _update(intent: UpdateProject, results: Sequence[Result]) -> Call | None:
    """Updates; where several projects fit, asks which is meant, and goes on with the answer."""
    last = results[-1] if results else None
    if last is None:
        return "update_project", {"project": intent.project, **intent.changes}
    if last.name == "update_project":
        choices = _choices(failure(last.content) or "")
        asked = any(result.name == "ask_user" for result in results)
        if len(choices) < 2 or asked:  # noqa: PLR2004  # one is no choice
            return None
        return "ask_user", {
            "question": f"Which project do you mean by {intent.project}?",
            "why": "More than one fits.",
            "kind": "clarification",
            "options": [f"{title} ({project_id})" for project_id, title in choices.items()],
        }
    if failure(last.content) is not None:
        return None
    choices = _choices(failure(results[0].content) or "")
    chosen = _chosen(describe(last.content), choices)
    return ("update_project", {"project": chosen, **intent.changes}) if chosen else None


def _choices(text: str) -> dict[str, str]:
    """The ids of projects in an error, each with the quoted title before it."""
    found: dict[str, str] = {}
    start = 0
    for match in _PROJECT_ID.finditer(text):
        titles = [quoted["title"] for quoted in _QUOTED.finditer(text[start : match.start()])]
        found[match[0]] = titles[-1] if titles else match[0]
        start = match.end()
    return found


def _chosen(answer: str, choices: Mapping[str, str]) -> str:
    named = _PROJECT_ID.search(answer)
    if named and named[0] in choices:
        return named[0]
    wanted = answer.strip().casefold()
    return next((project_id for project_id, title in choices.items() if title.casefold() == wanted), "")


def _complete(intent: CompleteTasks, results: Sequence[Result]) -> Call | None:
    """Lists what there is, then completes all of it in one call."""
    if not results:
        return "list_projects", {}
    if results[-1].name != "list_projects":
        return None
    tasks = list(_open_tasks(results[-1].content or "", intent.project))
    return ("complete_tasks", {"tasks": tasks}) if tasks else None


def _open_tasks(content: str, project: str) -> Iterator[str]:
    try:
        projects = json.loads(content)["projects"]
    except (ValueError, TypeError, KeyError):
        return
    for listed in projects:
        if not project or project.casefold() == str(listed.get("title", "")).casefold():
            for task in listed.get("tasks", ()):
                if str(task.get("status", "open")).lower() not in _DONE:
                    yield task["task_id"]
