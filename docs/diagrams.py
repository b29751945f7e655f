"""Writes what is generated in the pages beside it: the state diagrams that job-store enforces, and who may call what.

`make diagrams` writes them; a test compares. A call may be created one step from PROPOSED.
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

PAGES: Final = tuple(map(Path(__file__).with_name, ("architecture.md", "identity.md")))


def rendered(page: str) -> str:
    """Return the page with each generated part made anew."""
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
        lines += [f"    {before.name} --> {after.name}" for after in sorted(afters, key=_place)]
        if not afters:
            lines.append(f"    {before.name} --> [*]")
    return "\n".join([*lines, "```"])


def _place(state: Enum) -> int:
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
    """Yield the methods of Pawl in groups that stand together in the table, with those who may call them."""
    pawls = (item for item in CALLERS.items() if item[0].startswith("/pawl."))
    for (callers, service), group in groupby(pawls, key=lambda item: (item[1], item[0].rpartition("/")[0])):
        methods = ", ".join(name.rpartition("/")[2] for name, _ in group)
        yield callers, f"{service.rpartition('.')[2]}: {methods}"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
