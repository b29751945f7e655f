"""A lower bound: the same loop on bare sockets, without a client library or durability. It survives no failure."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))
from driver import QUESTION, TOOL, look_up, obey, options

END = b"0\r\n"  # the last chunk of an answer


async def main() -> None:
    url = urlsplit(options().model)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(messages: list[Any]) -> list[Any]:
        """Return the choices of the answer, chunk by chunk."""
        body = json.dumps({"model": "canned", "messages": messages, "tools": [TOOL], "stream": True}).encode()
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = idle.pop() if idle else await asyncio.open_connection(url.hostname, url.port)
        writer.write(head.encode() + body)
        events = []
        while (line := await reader.readline()) != END:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
        await reader.readline()
        idle.append((reader, writer))
        return [choice for event in events for choice in event["choices"]]

    async def run(_: str) -> str:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            deltas = [choice["delta"] for choice in await ask(messages)]
            calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
            if not calls:
                return "".join(delta.get("content", "") for delta in deltas)
            arguments = "".join(part["function"].get("arguments", "") for part in calls)
            function = {"name": calls[0]["function"]["name"], "arguments": arguments}
            asked = {"id": calls[0]["id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "tool_calls": [asked]})
            result = json.dumps(look_up(**json.loads(arguments)))
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})

    await obey(run)


uvloop.run(main())
