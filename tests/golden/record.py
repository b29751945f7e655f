"""Records the golden log again: `python -m tests.golden.record`. The tests that read it then show the differences."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx2

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import tool_pb2
from tests.golden import GAP, LOG
from tests.keys import LOCAL_KEY
from tests.servers import running_suite
from tests.system.suite.client import Agent, addresses

_TEXT = (
    "what is 17 * 23, then e-mail ann@example.com about lunch: see you at noon, then ask me whether to go on,"
    " then show me the plan, then slowly count to 12"
)
_CUT = {"text": "Let me try to", "reasoning": "Hm, a sum.", "fault": {"type": "drop", "after_chunks": 2}}
_SCRIPT = {"steps": [{"when": {"user_contains": "17 * 23", "round": 0}, "times": 1, "reply": _CUT}]}
_COUNTS, _SAID_ENOUGH = 5, 4
_PLAN = tool_pb2.ToolDefinition(
    name="show_plan",
    description="Shows the plan.",
    arguments_schema_json=b'{"type":"object","properties":{"title":{"type":"string"}}}',
    context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
    category=call_pb2.TOOL_CATEGORY_SAFE,
    effect_class=call_pb2.EFFECT_CLASS_AT_MOST_ONCE,
)
_EDITED = b'{"to": ["bob@example.com"], "subject": "lunch", "body": "At one."}'


async def main() -> None:
    """Record a run with a truncated answer, an edit, a question, a page tool and a takeover.

    Then trim the run and record the gap that replaces its events.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(_SCRIPT))
        async with running_suite(local_key=LOCAL_KEY, model_arguments=("--script", str(script))) as suite:
            url = f"http://{suite.endpoints.services['gateway'][0].http}"
            headers = {"authorization": f"Bearer {LOCAL_KEY}"}
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60.0) as endpoint:
                run_id = await _play(suite, endpoint)
                log = [event async for _, event in _events(endpoint, run_id)]
                LOG.write_text("[\n" + ",\n".join(json.dumps(event) for event in log) + "\n]\n")
                await _trim(suite, run_id)
                (gap,) = [event async for name, event in _events(endpoint, run_id) if name == "gap"]
                GAP.write_text(json.dumps(gap) + "\n")


async def _play(suite: Suite, endpoint: httpx2.AsyncClient) -> str:
    async with Agent(addresses(suite)[0]) as agent:
        start = agent_pb2.StartRunRequest(request_id="golden", text=_TEXT, front_end_tools=[_PLAN])
        run_id = (await agent.stub.StartRun(start, metadata=agent.metadata)).run.run_id
        gated = await agent.until_pending(run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
        await agent.decide(gated, call_pb2.DECISION_KIND_EDIT, request_id="edit", arguments_json=_EDITED)
        asked = await agent.until_pending(run_id, call_pb2.CALL_STATE_ASKED)
        await agent.decide(asked, call_pb2.DECISION_KIND_ANSWER, request_id="answer", answer="yes")
        offered = await agent.until_pending(run_id, call_pb2.CALL_STATE_OFFERED)
        shown = types_pb2.ToolResult(run_id=run_id, call_id=offered.call_id, content_json=b'"it is shown"')
        submit = agent_pb2.SubmitToolResultsRequest(request_id="shown", run_id=run_id, results=[shown])
        await agent.stub.SubmitToolResults(submit, metadata=agent.metadata)
        said = 0
        async for _, event in _events(endpoint, run_id):
            output = event.get("outputDelta", {})
            said += output.get("round", 0) == _COUNTS and bool(output.get("text"))
            if said == _SAID_ENOUGH:
                suite.kill("agent-loop")
                break
        assert (await agent.until_ended(run_id)).state == run_pb2.RUN_STATE_COMPLETED
        return run_id


async def _events(endpoint: httpx2.AsyncClient, run_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async with endpoint.stream("GET", f"/runs/{run_id}/events") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name != "end":
                yield name, json.loads(line.removeprefix("data: "))
                name = ""


async def _trim(suite: Suite, run_id: str) -> None:
    database = await asyncpg.connect(suite.database_url)
    try:
        async with database.transaction():
            last = await database.fetchval("SELECT last_seq FROM job_store.runs WHERE run_id = $1", run_id)
            await database.execute("DELETE FROM job_store.events WHERE run_id = $1 AND last_seq < $2", run_id, last)
            await database.execute("UPDATE job_store.runs SET trimmed_seq = $2 WHERE run_id = $1", run_id, last - 1)
    finally:
        await database.close()


if __name__ == "__main__":
    asyncio.run(main())
