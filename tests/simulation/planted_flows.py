"""Mutants of workflow runs."""

from __future__ import annotations

from tests.simulation.planted import Mutant

_PROGRAM = "pawl.agent_loop.workflows.program"

OF_FLOWS = (
    Mutant(
        name="nodes_that_succeeded_run_again",
        module="pawl.agent_loop.workflows.graph",
        text="        if until is None or until or record.stop or repeat is None:",
        instead="        if record.attempt < 2 and repeat is None:\n"
        "            return replace(record, state=NodeState.RETRYING, attempt=2, due_ms=end_ms, end_ms=None)\n"
        "        if until is None or until or record.stop or repeat is None:",
        checker="nodes_that_succeeded_never_run_again",
        seed=1,
    ),
    Mutant(
        name="workflows_end_before_their_nodes",
        module=_PROGRAM,
        text="has_ended = graph.has_ended(self._graph, self._cursor) and self._cursor.failure is None",
        instead="has_ended = bool(self._cursor.nodes) and self._cursor.failure is None",
        checker="workflow_runs_end_as_their_nodes",
        seed=1,
    ),
    Mutant(
        name="maps_leave_items_out",
        module="pawl.agent_loop.workflows.drafting",
        text="items[indexes.start : indexes.stop]",
        instead="items[indexes.start + 1 : indexes.stop]",
        checker="batches_process_each_item_once",
        seed=4,
    ),
)
