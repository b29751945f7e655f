"""Grants of series in some seeds, while tool versions, rules and required approvals change, and their checkers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pawl.event.v1 import call_pb2
from pawl.values import DecisionKind, Series
from tests.simulation.chance import Chance
from tests.simulation.history import Effect, Sent
from tests.simulation.record import Record, call_changes, call_state
from tests.simulation.registry import TOOLS
from tests.simulation.world import World

_PLAYED = 0.5
_RAISES = 0.5
_RAISED_TO = 2
_RAISED_WITHIN_SECONDS = 60.0
_GRANTS = 0.7
_EDITS = 0.5
# How late an iteration may start if it was due before the end of its series.
_LATE_SECONDS = 60.0


class Terms(NamedTuple):
    run_id: str
    arguments_json: bytes
    version: int
    interval_seconds: float
    iterations_max: int
    end_time: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantDecision:
    digest: str
    edited: Series | None
    granted: Series


def are_given(chance: Chance) -> bool:
    return chance.stream("grants").random() < _PLAYED


def grant_decision(
    chance: Chance, command_id: str, approval: call_pb2.ApprovalRequest, kind: DecisionKind
) -> GrantDecision | None:
    """Return the grant for a call of a series, or None if the decision is only about this call."""
    draw = chance.stream("grant", command_id)
    if not are_given(chance) or not approval.series.digest or kind is DecisionKind.REJECT or draw.random() > _GRANTS:
        return None
    shown = approval.series
    end = shown.end_time.ToNanoseconds() / 1e9 if shown.HasField("end_time") else None
    series = Series(interval_seconds=shown.interval_seconds, iterations_max=shown.iterations_max, end_time=end)
    if kind is not DecisionKind.EDIT or draw.random() > _EDITS:
        return GrantDecision(digest=shown.digest, edited=None, granted=series)
    edited = Series(interval_seconds=draw.choice([0.5, 2.0]), iterations_max=draw.choice([1, 2, 4]), end_time=end)
    return GrantDecision(digest=shown.digest, edited=edited, granted=edited)


class Owner:
    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = world.chance.stream("owner")

    async def live(self) -> None:
        journal = self._world.journal
        while are_given(self._world.chance) and not self._world.chance.calm:
            await asyncio.sleep(10.0 * self._draw.random())
            if self._draw.random() < 0.4:
                journal.version += 1
                self._world.history.tell(f"version {journal.version} of the gated tool")
            else:
                journal.requires_approval = not journal.requires_approval and self._draw.random() < 0.5
                self._world.history.tell(f"a rule requires_approval: {journal.requires_approval}")
        journal.requires_approval = False


class Deployment:
    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = world.chance.stream("deployment")

    async def live(self) -> None:
        """Raise the number of required approvals once. Old and new processes run in parallel for a while."""
        if not are_given(self._world.chance) or self._draw.random() > _RAISES:
            return
        await asyncio.sleep(_RAISED_WITHIN_SECONDS * self._draw.random())
        self._world.approvals_required = _RAISED_TO
        self._world.history.tell(f"gated calls need {_RAISED_TO} approvals")
        for agent in [agent for agent in self._world.agents if agent.process.alive]:
            if agent.process.alive:
                self._world.replace_agent(agent)
            await asyncio.sleep(3.0 * self._draw.random())


def grants(record: Record) -> Mapping[Terms, set[str]]:
    found: dict[Terms, set[str]] = defaultdict(set)
    for sent in record.history.commands:
        if sent.taken and sent.grants is not None and sent.user_id != "stranger":
            found[sent.grants].add(sent.user_id)
    return found


def commands_by_call(record: Record) -> Mapping[str, list[Sent]]:
    found: dict[str, list[Sent]] = defaultdict(list)
    for sent in record.history.commands:
        found[sent.call_id].append(sent)
    return found


def of_effect(given: Mapping[Terms, set[str]], record: Record, effect: Effect) -> Terms | None:
    required = record.calls[effect.call_id].approval.approvals_required
    fitting = (
        terms
        for terms, people in given.items()
        if (terms.run_id, terms.arguments_json, terms.version) == (effect.run_id, effect.arguments_json, effect.version)
        and (terms.end_time is None or effect.begin <= terms.end_time + _LATE_SECONDS)
        and len(people if required <= 1 else people - {effect.user_id}) >= required
    )
    return None if effect.requires_approval else next(fitting, None)


def series_stay_within_their_grant(record: Record) -> Iterator[str]:
    """I9, I10: no series starts more calls than were granted."""
    given, said = grants(record), commands_by_call(record)
    used: dict[Terms, set[str]] = defaultdict(set)
    for effect in (each for each in record.history.effects if TOOLS[each.tool_name].disposition == "APPROVE"):
        alone = any(each.taken and each.grants is None and each.content for each in said[effect.call_id])
        terms = None if alone else of_effect(given, record, effect)
        if terms is not None:
            used[terms].add(effect.call_id)
    return (
        f"{terms} was granted, and {len(calls)} calls ran: {sorted(calls)}"
        for terms, calls in used.items()
        if len(calls) > terms.iterations_max
    )


def grants_have_enough_approvers(record: Record) -> Iterator[str]:
    """I10: no iteration starts under a grant with fewer approvers than its worker requires."""
    given = grants(record)
    for run_id, run in record.runs.items():
        seen: set[str] = set()
        for event, call in call_changes(record.logs[run_id] if run.reports_to_conversation_id else ()):
            is_first = call.call_id not in seen
            seen.add(call.call_id)
            if is_first and call_state(call.state) != "AWAITING_APPROVAL" and call.approval.series.digest:
                wanted = record.history.approvals_required[record.history.owners[run_id, event.attempt]]
                of_it = [people for terms, people in given.items() if terms[:2] == (run_id, call.arguments_json)]
                if not any(len(people if wanted <= 1 else people - {run.user_id}) >= wanted for people in of_it):
                    yield f"{call.call_id} of {run_id} started under a grant of {of_it}, and {wanted} people are wanted"


def granted(run_id: str, content: bytes, version: int, decision: GrantDecision | None) -> Terms | None:
    if decision is None:
        return None
    series = decision.granted
    return Terms(run_id, content, version, series.interval_seconds, series.iterations_max, series.end_time)


CHECKERS = (series_stay_within_their_grant, grants_have_enough_approvers)
