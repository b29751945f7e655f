"""Writes the generated parts of pages: state diagrams and permissions.

Run by `make diagrams`; a test compares the pages with the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.job_store.ledger.rules import call_table, run_table
from pawl.values import CallState

StateT = TypeVar("StateT", bound=Enum)

PAGES: Final = tuple(Path(__file__).parent / page for page in ("design/architecture.md", "guides/identity.md"))


def rendered(page: str) -> str:
    """Return the page with all generated parts renewed."""
    page = _replaced(page, "run", _diagram([run_table.INITIAL], run_table.TRANSITIONS))
    page = _replaced(page, "call", _diagram([CallState.PROPOSED], call_table.TRANSITIONS))
    page = _replaced(page, "callers", "\n".join(_callers_of_roles()))
    return _replaced(page, "services", "\n".join(_callers_of_services()))


def _replaced(page: str, name: str, part: str) -> str:
    begin, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{part}\n{end}", page)


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


def _callers_of_roles() -> Iterator[str]:
    roles = [role for role in Role if any(role in callers for callers, _ in _rows())]
    yield "| | " + " | ".join(f"`{role}`" for role in roles) + " |"
    yield "|---" * (len(roles) + 1) + "|"
    for callers, methods in _rows():
        if callers & ROLES:
            yield f"| {methods} | " + " | ".join("yes" if role in callers else "" for role in roles) + " |"


def _callers_of_services() -> Iterator[str]:
    yield "| | services |"
    yield "|---|---|"
    for callers, methods in _rows():
        if not callers & ROLES:
            yield f"| {methods} | {', '.join(sorted(caller.partition(':')[2] for caller in callers))} |"


def _rows() -> Iterator[tuple[frozenset[str], str]]:
    """Yield groups of methods, one per service and set of callers, each with its callers."""
    pawls = (item for item in CALLERS.items() if item[0].startswith("/pawl."))
    for (callers, service), group in groupby(pawls, key=lambda item: (item[1], item[0].rpartition("/")[0])):
        methods = ", ".join(name.rpartition("/")[2] for name, _ in group)
        yield callers, f"{service.rpartition('.')[2]}: {methods}"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
