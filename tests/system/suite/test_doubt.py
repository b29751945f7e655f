"""A call whose outcome nobody knows, and the operator who finds out."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from pawl.event.v1 import call_pb2, run_pb2

from services.launcher.suite import Suite
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK_SOMEBODY = run_pb2.RunOptions(unknown_outcome_policy=run_pb2.UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION)


async def _pawl(suite: Suite, *arguments: str) -> str:
    """The output of a command that must work."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.cli", "--data", suite.endpoints.data, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (("--happened", '"sent at noon"'), ("sent at noon", "done\n")),
        (("--run-again",), ("finished", "done\ndone\n")),
    ],
)
async def test_a_call_in_doubt_waits_for_an_operator_who_says_what_became_of_it(
    suite: Suite,
    agent: Agent,
    tmp_path: Path,
    finding: tuple[str, ...],
    outcome: tuple[str, str],
) -> None:
    """I5: the effect is not repeated unless somebody says that it did not happen."""
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 3.0})
    run = await agent.start(f"call act_once with {arguments}", options=ASK_SOMEBODY)

    async def happened() -> bool:
        return effects.exists()

    await until(happened)
    suite.kill("tool-registry")
    found = await agent.until(run.run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
    await suite.wait_ready("tool-registry")
    (doubted,) = found.pending_calls
    assert f"pawl resolve {run.run_id} {doubted.call_id}" in await _pawl(suite, "inbox", "--list")
    await _pawl(suite, "resolve", run.run_id, doubted.call_id, *finding)
    ended = await agent.until_ended(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    (call,) = await agent.calls(run.run_id)
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    assert (json.loads(call.result.content_json), effects.read_text()) == outcome
    assert run.run_id not in await _pawl(suite, "inbox", "--list")
