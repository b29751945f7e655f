"""Writes the state diagrams of architecture.md from the tables that job-store enforces.

`make diagrams` writes them; a test compares. A call may be created one step from PROPOSED.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from pawl.job_store.domain import call_table, run_table
from pawl.job_store.domain.states import CallState

StateT = TypeVar("StateT", bound=Enum)

PAGE: Final = Path(__file__).with_name("architecture.md")


def rendered(page: str) -> str:
    """Return the page with each generated part made anew."""
    page = _replaced(page, "run", _diagram([run_table.INITIAL], run_table.TRANSITIONS))
    return _replaced(page, "call", _diagram([CallState.PROPOSED], call_table.TRANSITIONS))


def _replaced(page: str, name: str, diagram: str) -> str:
    begin, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{diagram}\n{end}", page)


def _diagram(initial: Iterable[StateT], transitions: Mapping[StateT, frozenset[StateT]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state.name}" for state in initial]
    for before, afters in transitions.items():
        lines += [f"    {before.name} --> {after.name}" for after in sorted(afters, key=_place)]
        if not afters:
            lines.append(f"    {before.name} --> [*]")
    return "\n".join([*lines, "```"])


def _place(state: Enum) -> int:
    return list(type(state)).index(state)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
