"""A call whose outcome nobody knows, and the operator who finds out."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests import commands
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

SUCCEEDED = call_pb2.CALL_STATE_SUCCEEDED
FAILED = call_pb2.CALL_STATE_FAILED
ASK_SOMEBODY = run_pb2.RunOptions(unknown_outcome_policy=run_pb2.UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION)


async def _pawl(suite: Suite, *arguments: str) -> str:
    """The output of a command that must work."""
    done = await asyncio.to_thread(commands.pawl, "--data", suite.endpoints.data, *arguments, environment=os.environ)
    assert done.code == 0, done.output + done.errors
    return done.output


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (("--happened", '"sent at noon"'), (SUCCEEDED, "sent at noon", "done\n")),
        (("--run-again",), (SUCCEEDED, "finished", "done\ndone\n")),
        (("--tell-model",), (FAILED, "An operator found that this call did not happen.", "done\n")),
    ],
    ids=["happened", "run again", "tell the model"],
)
async def test_a_call_in_doubt_waits_for_an_operator_who_says_what_became_of_it(
    suite: Suite,
    agent: Agent,
    tmp_path: Path,
    finding: tuple[str, ...],
    outcome: tuple[call_pb2.CallState.ValueType, str, str],
) -> None:
    """I5: the effect is not repeated unless somebody says that it did not happen; the operator is another user."""
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 6.0})
    run = await agent.start(f"call act_once with {arguments}", options=ASK_SOMEBODY)

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())  # not between its opening and its writing

    await until(happened)
    suite.kill("tool-registry")
    found = await agent.until(run.run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
    await suite.wait_ready("tool-registry")
    assert found.attention.reason == run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME
    (doubted,) = found.pending_calls
    command = f"pawl resolve {run.run_id} {doubted.call_id}"
    assert command in await _pawl(suite, "inbox", "--list")
    assert command in await _pawl(suite, "--user", "helper", "attention")
    await _pawl(suite, "--user", "helper", "resolve", run.run_id, doubted.call_id, *finding)
    ended = await agent.until_ended(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    (call,) = await agent.calls(run.run_id)
    result = json.loads(call.result.content_json)
    shown = result["error"] if isinstance(result, dict) else result
    assert (call.state, shown, effects.read_text()) == outcome
    assert run.run_id not in await _pawl(suite, "inbox", "--list")
    assert run.run_id not in await _pawl(suite, "--user", "helper", "attention")
    (acted,) = [event.operator_acted for event in await agent.events(run.run_id) if event.HasField("operator_acted")]
    assert (acted.user_id, acted.act, acted.call_id) == ("helper", event_pb2.OPERATOR_ACT_RESOLVED, doubted.call_id)
