"""Where a run stands, as `pawl status` says it."""

from __future__ import annotations

from pawl.cli.status import standing
from pawl.event.v1 import run_pb2


def test_a_run_says_which_version_of_which_agent_drives_it_and_its_labels() -> None:
    run = run_pb2.Run(agent=run_pb2.PinnedAgent(name="clerk", version=2), labels={"case": "42"})
    lines = standing(run)
    assert "driven by the agent clerk, version 2" in lines
    assert "labels: case=42" in lines


def test_a_run_of_the_deployments_default_names_no_agent() -> None:
    assert not any("agent" in line for line in standing(run_pb2.Run()))


def test_a_run_with_a_budget_says_how_much_of_it_is_used() -> None:
    usage = run_pb2.Usage(input_tokens=3, output_tokens=4)
    assert "may use 20 tokens; it has used 7" in standing(run_pb2.Run(token_budget=20, usage=usage))
    assert not any("tokens" in line for line in standing(run_pb2.Run(usage=usage)))
