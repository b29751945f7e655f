"""Records the golden log again: `python -m tests.golden.record`. The tests that read it then show the differences."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx2

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.golden import GAP, LOG
from tests.keys import LOCAL_KEY

_TEXT = (
    "what is 17 * 23, then e-mail ann@example.com about lunch: see you at noon, then ask me whether to go on,"
    " then show me the plan, then slowly count to 12"
)
_CUT = {"text": "Let me try to", "reasoning": "Hm, a sum.", "fault": {"type": "drop", "after_chunks": 2}}
_SCRIPT = {"steps": [{"when": {"user_contains": "17 * 23", "round": 0}, "times": 1, "reply": _CUT}]}
_COUNTS, _SAID_ENOUGH = 5, 4
_AGENT = "/rpc/pawl.agent.v1.AgentService"
_PLAN = {
    "name": "show_plan",
    "description": "Shows the plan.",
    "argumentsSchemaJson": base64.b64encode(b'{"type":"object","properties":{"title":{"type":"string"}}}').decode(),
    "context": "EXECUTION_CONTEXT_FRONTEND",
    "category": "TOOL_CATEGORY_SAFE",
    "effectClass": "EFFECT_CLASS_AT_MOST_ONCE",
}
_EDITED = {"to": ["bob@example.com"], "subject": "lunch", "body": "At one."}


async def main() -> None:
    """Record a run with a truncated answer, an edit, a question, a page tool and a takeover.

    Then trim the run and record the gap that replaces its events.
    """
    with tempfile.TemporaryDirectory(prefix="pawl-golden-") as name:
        folder = Path(name)
        script = folder / "script.json"
        script.write_text(json.dumps(_SCRIPT))
        options = SuiteOptions(data=folder / "data", local_key=LOCAL_KEY, model_arguments=("--script", str(script)))
        async with Suite(options) as suite:
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
    async def ask(method: str, **request: Any) -> Any:
        answer = await endpoint.post(f"{_AGENT}/{method}", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    run_id: str = (await ask("StartRun", requestId="golden", text=_TEXT, frontEndTools=[_PLAN]))["run"]["runId"]

    async def pending(state: str) -> dict[str, Any]:
        while True:
            run = (await ask("GetRun", runId=run_id))["run"]
            for call in run.get("pendingCalls", ()):
                if call["state"] == f"CALL_STATE_{state}":
                    return {
                        "runId": run_id,
                        "callId": call["callId"],
                        "digest": call.get("approval", {}).get("digest", ""),
                    }
            await asyncio.sleep(0.1)

    named = await pending("AWAITING_APPROVAL")
    edit = {"kind": "DECISION_KIND_EDIT", "argumentsJson": base64.b64encode(json.dumps(_EDITED).encode()).decode()}
    await ask("DecideCalls", requestId="edit", decisions=[named | edit])
    named = await pending("ASKED")
    await ask("DecideCalls", requestId="answer", decisions=[named | {"kind": "DECISION_KIND_ANSWER", "answer": "yes"}])
    offered = {name: value for name, value in (await pending("OFFERED")).items() if name != "digest"}
    shown = {"contentJson": base64.b64encode(b'"it is shown"').decode()}
    await ask("SubmitToolResults", requestId="shown", runId=run_id, results=[offered | shown])
    said = 0
    async for _, event in _events(endpoint, run_id):
        output = event.get("outputDelta", {})
        said += output.get("round", 0) == _COUNTS and bool(output.get("text"))
        if said == _SAID_ENOUGH:
            suite.kill("agent-loop")
            break
    state = ""
    while state not in {"RUN_STATE_COMPLETED", "RUN_STATE_FAILED"}:
        answer = await endpoint.post(f"{_AGENT}/GetRun", json={"runId": run_id, "waitSeconds": 10})
        state = answer.json().get("run", {}).get("state", "")  # empty while no replica runs
        await asyncio.sleep(0.1)
    assert state == "RUN_STATE_COMPLETED"
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
