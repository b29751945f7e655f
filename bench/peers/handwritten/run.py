"""The loop that people write by hand with the openai client. Nothing is durable."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))
from driver import QUESTION, TOOL, look_up, obey, options


async def main() -> None:
    client = AsyncOpenAI(base_url=options().model, api_key="none", max_retries=0)

    async def run(_: str) -> str:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            stream = await client.chat.completions.create(
                model="canned", messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
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
            if not calls:
                return text
            asked = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
            messages.append({"role": "assistant", "content": text or None, "tool_calls": asked})
            for call in calls.values():
                result = json.dumps(look_up(**json.loads(call["arguments"])))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    await obey(run)


uvloop.run(main())
