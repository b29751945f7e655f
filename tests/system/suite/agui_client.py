"""Front ends on the published clients of AG-UI, in a process of node, for tests."""

from __future__ import annotations

import asyncio
import itertools
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import npm
from tests.keys import LOCAL_KEY

_LINE_BYTES_MAX = 2**24


class Asked:
    """One run of AG-UI that a front end has asked for."""

    def __init__(self) -> None:
        self._seen: dict[str, asyncio.Event] = {}
        self.told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def seen(self, kind: str) -> asyncio.Event:
        """Return what is set once an event of that type, or a custom one of that name, has come."""
        return self._seen.setdefault(kind, asyncio.Event())


class Node:
    """A process with one generation of the client."""

    def __init__(self, process: Process, *, legacy: bool) -> None:
        self.legacy = legacy
        self._process = process
        self._numbers = itertools.count()
        self._asked: dict[int, Asked] = {}

    def ask(self, **request: Any) -> Asked:
        """Have an agent run once."""
        number, asked = next(self._numbers), Asked()
        self._asked[number] = asked
        self._write({"id": number, "key": LOCAL_KEY} | request)
        return asked

    def stop(self, name: str) -> None:
        """Have an agent stop, as the client does it."""
        self._write({"stops": name})

    def _write(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def listen(self) -> None:
        """Take what the process says, to its end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            asked = self._asked[said.pop("id")]
            if "seen" in said:
                asked.seen(said["seen"]).set()
            else:
                asked.told.set_result(said)


@asynccontextmanager
async def node(packages: Path, name: str) -> AsyncIterator[Node]:
    """Start the process with a client of `packages`, and end it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        npm.NODE, "front_end.mjs", name, cwd=packages, stdin=pipe, stdout=pipe, limit=_LINE_BYTES_MAX
    )
    started = Node(process, legacy=name == "agui-0.0")
    listening = asyncio.create_task(started.listen())
    try:
        yield started
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening


class FrontEnd:
    """A page with an agent on a thread."""

    _numbers = itertools.count()

    def __init__(self, node: Node, gateway: str, thread: str) -> None:
        self.thread = thread
        self.gateway = gateway
        self._node = node
        self._name = f"page-{next(self._numbers)}"
        self.messages: list[dict[str, Any]] = []

    def begin(self, text: str = "", *, message: dict[str, Any] | None = None, **parameters: Any) -> Asked:
        """Have the agent run, with a message more if there is one."""
        more = message or ({"role": "user", "content": text} if text else None)
        url = f"{self.gateway}/agui"
        return self._node.ask(name=self._name, url=url, threadId=self.thread, message=more, parameters=parameters)

    async def end(self, asked: Asked) -> dict[str, Any]:
        """Return the event with which a run ended; its messages are those of the page then."""
        told = await asked.told
        assert "error" not in told, told["error"]
        self.messages = told["messages"]
        end: dict[str, Any] = told["end"]
        return end

    async def ask(self, text: str = "", **more: Any) -> dict[str, Any]:
        """Run to the end, and return the event with which it ended."""
        return await self.end(self.begin(text, **more))

    def stop(self) -> None:
        """Stop the agent's run, by the means of the client."""
        self._node.stop(self._name)

    async def resume(self, interrupts: list[dict[str, Any]], *payloads: Any) -> dict[str, Any]:
        """Answer interrupts, each with its payload, and return the event with which the run ended then."""
        pairs = zip(interrupts, payloads, strict=True)
        return await self.ask(
            resume=[{"interruptId": each["id"], "status": "resolved", "payload": said} for each, said in pairs]
        )

    def said(self) -> list[tuple[str, str]]:
        """Return roles and texts of the messages, reasoning left out."""
        return [(each["role"], each.get("content") or "") for each in self.messages if each["role"] != "reasoning"]

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls in the messages."""
        return [call for each in self.messages for call in each.get("toolCalls", ())]
