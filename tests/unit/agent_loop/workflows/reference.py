"""An independent interpreter of workflows, for tests. It shares no code with the engine.

`Reference` holds the state of a run. `open` is the work in progress; the test ends it, in any order, with `end`. After
each end, all nodes are examined again from the first, so nothing depends on what changed. A map is one piece of work,
whose outcome is `map_outcome` of the outcomes of its items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Document = Mapping[str, Any]

_EXPRESSION: Final = re.compile(r"\$\{([\w.]+)\}")
_NODE: Final = re.compile(r"\bnodes\.(\w+)")
_ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "SKIPPED", "CANCELLED"})
# Kinds that take one of the run's slots.
_SLOTS: Final = frozenset({"tool", "agent", "human", "workflow", "map"})
# The field of each kind that is rendered when an attempt starts.
_INPUTS: Final = {
    "tool": "arguments",
    "agent": "task",
    "human": "question",
    "map": "items",
    "workflow": "input",
    "wait": "until",
    "condition": "if",
    "output": "value",
}


class Succeeded(NamedTuple):
    output: Any


class Failed(NamedTuple):
    reason: str
    # Whether another attempt may follow.
    retryable: bool = False


Outcome = Succeeded | Failed


@dataclass
class Work:
    """A node, or a branch of a parallel node (`both.a`)."""

    document: Document
    branches: dict[str, Work]
    state: str = "PENDING"
    iteration: int = 1
    attempt: int = 1
    output: Any = None
    reason: str = ""
    # Position among all failures of the run.
    failure: int = 0
    # The rendered input of the attempt: arguments, task, items and so on.
    given: Any = None

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def is_ended(self) -> bool:
        return self.state in _ENDED

    def within(self, path: str) -> Iterator[tuple[str, Work]]:
        """Yield this work and all below it, with their paths."""
        yield path, self
        for name, branch in sorted(self.branches.items()):
            yield from branch.within(f"{path}.{name}")


class Reference:
    """The state of a run with this definition (a JSON document) and input."""

    def __init__(self, document: Document, given: Any = None) -> None:
        self.document = document
        self.given = given
        self.edges = edges_of(document["nodes"])
        self.nodes = {name: _work(document["nodes"][name]) for name in order_of(document["nodes"])}
        self.state = "RUNNING"
        self.failed_node = ""
        self.failures = 0
        self._settle()

    @property
    def open(self) -> dict[str, Work]:
        """The work in progress, by path. Parallel nodes are represented by their branches."""
        return {path: work for path, work in self._all() if work.state == "RUNNING" and not work.branches}

    @property
    def states(self) -> dict[str, str]:
        return {path: work.state for path, work in self._all()}

    @property
    def output(self) -> Any:
        return next((work.output for work in self.nodes.values() if work.kind == "output"), None)

    def end(self, path: str, outcome: Outcome) -> None:
        """End the attempt of a piece of open work, or a parallel node with a failure, such as NODE_TIMEOUT."""
        work = dict(self._all())[path]
        assert work.state == "RUNNING", work.state
        if isinstance(outcome, Succeeded):
            assert not work.branches
            self._succeed(work, outcome.output)
        elif outcome.retryable and work.attempt < work.document.get("retry", {}).get("attempts", 1):
            work.attempt += 1
            self._begin(work)
        else:
            self._fail(work, outcome.reason)
            _cancel(each for _, each in work.within("") if not each.is_ended)
        self._settle()

    def _all(self) -> Iterator[tuple[str, Work]]:
        for name, work in self.nodes.items():
            yield from work.within(name)

    def _settle(self) -> None:
        while self.state == "RUNNING" and (self._ends() or self._begins()):
            pass
        if self.state == "RUNNING" and all(work.is_ended for work in self.nodes.values()):
            self.state = "COMPLETED"

    def _ends(self) -> bool:
        """End one parallel node or the run. Return whether anything ended."""
        for _, work in reversed(list(self._all())):
            if work.branches and work.state == "RUNNING" and self._parallel_ends(work):
                return True
        for name, work in self.nodes.items():
            if work.state == "FAILED" and work.document.get("on_error", "fail") in ("fail", "undo"):
                self.state, self.failed_node = "FAILED", name
                _cancel(each for _, each in self._all() if each.state == "RUNNING")
                return True
        return False

    def _begins(self) -> bool:
        """Start or skip one node or branch, if any is ready. Return whether one was."""
        for name, work in self.nodes.items():
            verdict = self._verdict(name) if work.state == "PENDING" else ""
            if verdict == "skip":
                for _, each in work.within(name):
                    each.state = "SKIPPED"
                return True
            if verdict == "start" and self._begin_if_free(work):
                return True
            for _, parent in work.within(name):
                for _, branch in sorted(parent.branches.items()):
                    if parent.state == "RUNNING" and branch.state == "PENDING" and self._begin_if_free(branch):
                        return True
        return False

    def _verdict(self, name: str) -> str:
        """Return whether a pending node starts or is skipped, or "" if neither is decided."""
        found = {source: kind for (source, target), kind in self.edges.items() if target == name}
        if not found:
            return "start"
        control = {source: kind for source, kind in found.items() if kind != "reference"} or found
        decided = {source for source in found if self.nodes[source].is_ended}
        active = {source for source in decided & control.keys() if self._is_active(source, control[source])}
        undecided = control.keys() - decided
        join = self.document["nodes"][name].get("join", "all")
        if join == "all":
            met, possible = not undecided and bool(active), bool(undecided or active)
        else:
            needed = 1 if join == "any" else join
            met, possible = len(active) >= needed, len(active) + len(undecided) >= needed
        if not possible:
            return "skip"
        return "start" if met and found.keys() - control.keys() <= decided else ""

    def _is_active(self, source: str, kind: str) -> bool:
        work = self.nodes[source]
        on_error = work.document.get("on_error", "fail")
        if kind == "go_to":
            return work.state == "FAILED"
        if kind in {"then", "else"}:
            return work.state == "SUCCEEDED" and work.output is (kind == "then")
        return work.state == "SUCCEEDED" or (work.state == "FAILED" and on_error == "continue")

    def _begin_if_free(self, work: Work) -> bool:
        busy = sum(each.state == "RUNNING" and each.kind in _SLOTS for _, each in self._all())
        if work.kind in _SLOTS and busy >= self.document.get("concurrency", 10):
            return False
        self._begin(work)
        return True

    def _begin(self, work: Work) -> None:
        """Start an attempt. Work that takes no time ends immediately."""
        work.state = "RUNNING"
        if work.kind not in _INPUTS:
            return
        try:
            work.given = self._render(work.document.get(_INPUTS[work.kind]), {})
        except LookupError:
            self._fail(work, "EXPRESSION_FAILED")
            return
        if work.kind == "map" and not isinstance(work.given, list):
            self._fail(work, "MAP_NOT_A_LIST")
        elif work.kind == "condition" and not isinstance(work.given, bool):
            self._fail(work, "EXPRESSION_FAILED")
        elif work.kind in {"condition", "output"} or (work.kind == "map" and not work.given):
            work.state, work.output = "SUCCEEDED", work.given

    def _succeed(self, work: Work, output: Any) -> None:
        repeat = work.document.get("repeat")
        if repeat is None:
            work.state, work.output = "SUCCEEDED", output
            return
        try:
            is_done = self._render(repeat["until"], {"output": output, "iteration": work.iteration})
        except LookupError:
            is_done = None
        if not isinstance(is_done, bool):
            self._fail(work, "EXPRESSION_FAILED")
        elif is_done:
            work.state, work.output = "SUCCEEDED", output
        elif work.iteration >= repeat.get("max", 20):
            self._fail(work, "REPEAT_LIMIT")
        else:
            work.iteration, work.attempt = work.iteration + 1, 1
            self._begin(work)

    def _parallel_ends(self, work: Work) -> bool:
        branches = work.branches
        require: Any = work.document.get("require", "all")
        needed: int = {"all": len(branches), "any": 1}.get(require, require)
        succeeded = {name: each.output for name, each in sorted(branches.items()) if each.state == "SUCCEEDED"}
        failed = [each for each in branches.values() if each.state == "FAILED"]
        if len(succeeded) < needed and len(branches) - len(failed) >= needed:
            return False
        if len(succeeded) >= needed:
            work.state, work.output = "SUCCEEDED", succeeded
        else:
            # The branch that failed last made it impossible.
            self._fail(work, max(failed, key=lambda each: each.failure).reason)
        _cancel(each for branch in branches.values() for _, each in branch.within("") if not each.is_ended)
        return True

    def _fail(self, work: Work, reason: str) -> None:
        self.failures += 1
        work.state, work.reason, work.failure = "FAILED", reason, self.failures

    def _render(self, template: Any, more: Mapping[str, Any]) -> Any:
        """Return a template with its plain paths resolved. Raise LookupError if a path does not exist."""
        if isinstance(template, dict):
            return {name: self._render(value, more) for name, value in template.items()}
        if isinstance(template, list):
            return [self._render(value, more) for value in template]
        if not isinstance(template, str):
            return template
        nodes = {name: {"output": work.output, "state": work.state} for name, work in self.nodes.items()}
        scope = {"input": self.given, "nodes": nodes, **more}
        if (whole := _EXPRESSION.fullmatch(template)) is not None:
            return _follow(scope, whole[1])
        return _EXPRESSION.sub(lambda found: _text(_follow(scope, found[1])), template)


def edges_of(nodes: Document) -> dict[tuple[str, str], str]:
    """Return the kind of the edge between two nodes, for those that have one."""
    found: dict[tuple[str, str], str] = {}
    for name, node in nodes.items():
        for source in _NODE.findall(json.dumps(node)):
            found[source, name] = "reference"
    for name, node in nodes.items():
        for source in node.get("after", []):
            found[source, name] = "after"
    for name, node in nodes.items():
        for side in ("else", "then"):
            for target in node.get(side, []):
                found[name, target] = side
        if isinstance(on_error := node.get("on_error"), dict):
            found[name, on_error["go_to"]] = "go_to"
    return found


def order_of(nodes: Document) -> list[str]:
    """Return the names in topological order, then by name."""
    ordered: list[str] = []
    before = {name: {source for source, target in edges_of(nodes) if target == name} for name in nodes}
    while len(ordered) < len(nodes):
        ordered.append(min(name for name in nodes if name not in ordered and before[name] <= set(ordered)))
    return ordered


def map_outcome(outcomes: Sequence[Outcome], tolerate: int | str = 0) -> Outcome:
    """Return the outcome of a map from the outcomes of its items, in the order of the list.

    A failed map may have the reason of any failed item.
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if isinstance(tolerate, str):
        is_failed = 100 * len(failed) > int(tolerate.removesuffix("%")) * len(outcomes)
    else:
        is_failed = len(failed) > tolerate
    if is_failed:
        return failed[0]
    return Succeeded([outcome.output if isinstance(outcome, Succeeded) else None for outcome in outcomes])


def _work(document: Document) -> Work:
    return Work(document, {name: _work(branch) for name, branch in document.get("branches", {}).items()})


def _cancel(works: Iterator[Work]) -> None:
    for work in list(works):
        work.state = "CANCELLED"


def _follow(scope: Any, path: str) -> Any:
    for step in path.split("."):
        # Text and null have no fields.
        scope = (scope if isinstance(scope, dict) else {})[step]
    return scope


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
