"""DBOS: the hand-written loop as a workflow in PostgreSQL or SQLite. Each model call and each tool call is a step."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from dbos import DBOS, DBOSConfig, SetWorkflowID
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))
import driver

OPTIONS = driver.options()
CONFIG: DBOSConfig = {
    "name": "bench",
    "system_database_url": OPTIONS.database or f"sqlite:///{OPTIONS.data}/dbos.sqlite",
    "run_admin_server": False,
    "log_level": "ERROR",
}
DBOS(config=CONFIG)
CLIENT = AsyncOpenAI(base_url=OPTIONS.model, api_key="none", max_retries=0)


@DBOS.step()
async def call_model(messages: list[Any]) -> dict[str, Any]:
    stream = await CLIENT.chat.completions.create(
        model="canned", messages=messages, tools=[driver.TOOL], stream=True, stream_options={"include_usage": True}
    )
    text, calls = "", {}
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return {"text": text, "calls": list(calls.values())}


@DBOS.step()
async def call_tool(arguments: str) -> str:
    return json.dumps(driver.look_up(**json.loads(arguments)))


@DBOS.workflow()
async def agent(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = await call_model(messages)
        if not answer["calls"]:
            return str(answer["text"])
        asked = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in answer["calls"]
        ]
        messages.append({"role": "assistant", "content": answer["text"] or None, "tool_calls": asked})
        for call in answer["calls"]:
            result = await call_tool(call["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def run(run_id: str) -> str:
    with SetWorkflowID(run_id):
        return await agent(driver.QUESTION)


async def main() -> None:
    DBOS.launch()
    await driver.obey(run)
    DBOS.destroy()


asyncio.run(main())
