"""State diagrams for the architecture page, from the tables that job-store enforces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, TypeVar

from pawl.job_store.ledger.rules import call_table, run_table
from pawl.values import CallState

StateT = TypeVar("StateT", bound=Enum)

PAGE: Final = "design/architecture.md"


def drawn(page: str) -> str:
    """Return the page with a diagram instead of each marker.

    Raises:
        ValueError: a marker is missing.
    """
    diagrams = {
        "<!-- generated:run -->": _diagram([run_table.INITIAL], run_table.TRANSITIONS),
        "<!-- generated:call -->": _diagram([CallState.PROPOSED], call_table.TRANSITIONS),
    }
    for marker, diagram in diagrams.items():
        if page.count(marker) != 1:
            raise ValueError(f"{PAGE} must contain {marker} once, got {page.count(marker)}")
        page = page.replace(marker, diagram)
    return page


def _diagram(initial: Iterable[StateT], transitions: Mapping[StateT, frozenset[StateT]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state.name}" for state in initial]
    for before, afters in transitions.items():
        lines += [f"    {before.name} --> {after.name}" for after in sorted(afters, key=_position)]
        if not afters:
            lines.append(f"    {before.name} --> [*]")
    return "\n".join([*lines, "```"])


def _position(state: Enum) -> int:
    return list(type(state)).index(state)
