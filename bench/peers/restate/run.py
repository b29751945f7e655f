"""Restate: the hand-written loop as a durable handler. Each model call and each tool call is a journaled step."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import httpx2
import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))
import driver

OPTIONS = driver.options()
CLIENT = AsyncOpenAI(base_url=OPTIONS.model, api_key="none", max_retries=0)
agent = restate.Service("agent")


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


async def call_tool(arguments: str) -> str:
    return json.dumps(driver.look_up(**json.loads(arguments)))


@agent.handler()
async def run(context: restate.Context, question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = await context.run_typed("model", call_model, messages=messages)
        if not answer["calls"]:
            return str(answer["text"])
        asked = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in answer["calls"]
        ]
        messages.append({"role": "assistant", "content": answer["text"] or None, "tool_calls": asked})
        for call in answer["calls"]:
            result = await context.run_typed("tool", call_tool, arguments=call["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def main() -> None:
    endpoint, ingress, admin, node = (free_port() for _ in range(4))
    config = Config()
    config.bind = [f"127.0.0.1:{endpoint}"]
    over = asyncio.Event()
    app: Any = restate.app([agent])
    serving = asyncio.create_task(serve(app, config, shutdown_trigger=over.wait))
    settings = {
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_BASE_DIR": str(OPTIONS.data / "restate"),
        "RESTATE_LOG_FILTER": "error",
        "DO_NOT_TRACK": "1",
    }
    server = await asyncio.create_subprocess_exec(
        os.environ["RESTATE_SERVER"], "--no-logo", env=os.environ | settings, stdout=sys.stderr
    )
    try:
        async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=64)) as client:
            for _ in range(100):
                try:
                    body = {"uri": f"http://127.0.0.1:{endpoint}"}
                    answer = await client.post(f"http://127.0.0.1:{admin}/deployments", json=body)
                    answer.raise_for_status()
                    break
                except httpx2.HTTPError:
                    await asyncio.sleep(0.2)

            async def start(run_id: str) -> str:
                answer = await client.post(
                    f"http://127.0.0.1:{ingress}/agent/run", json=driver.QUESTION, headers={"idempotency-key": run_id}
                )
                answer.raise_for_status()
                return str(answer.json())

            await driver.obey(start)
    finally:
        server.terminate()
        await server.wait()
        over.set()
        await serving


asyncio.run(main())
