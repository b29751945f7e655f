"""Tools that no module of Pawl has, of an MCP server and of a worker, which note down what ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import source_pb2, source_pb2_grpc, tool_pb2, tool_pb2_grpc
from pawl.worker import Worker
from tests.fakes.mcp_program import stdio_config
from tests.keys import LOCAL_KEY, keyed_channel
from tests.poll import until

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

HARMLESS = {"server.echo", "ping"}
"""What may run as the model likes."""
GATED = {"server.note", "wipe"}
"""What nobody has approved: a tool of which its source says nothing, and one that destroys."""


class Attached:
    """What the tools were asked to do."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self.worked: set[str] = set()

    @property
    def run(self) -> set[str]:
        """The tools that ran."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return {f"server.{line.removeprefix('call ')}" for line in lines if line.startswith("call ")} | self.worked


@asynccontextmanager
async def attached(address: str, folder: Path) -> AsyncIterator[Attached]:
    """Have an MCP server and a worker until the block ends."""
    folder.mkdir()
    made = Attached(folder)
    tools = [{"name": name, "description": "Does something.", "inputSchema": _SCHEMA} for name in ("echo", "note")]
    (folder / "tools.json").write_text(json.dumps(tools))
    server = source_pb2.SourceConfig(
        name="server",
        mcp_stdio=stdio_config(folder),
        policies=[source_pb2.SourceToolPolicy(tool_name="echo", category=call_pb2.TOOL_CATEGORY_SAFE)],
    )
    worker = Worker(address, name="worst-case", api_key=LOCAL_KEY)

    @worker.tool(category="SAFE", effect="READ_ONLY")
    def ping(text: str) -> str:
        """Do something."""
        made.worked.add("ping")
        return text

    @worker.tool(category="DESTRUCTIVE")
    def wipe(text: str) -> str:
        """Do something."""
        made.worked.add("wipe")
        return text

    async with keyed_channel(address) as channel:
        sources = source_pb2_grpc.SourceServiceStub(channel)
        await sources.AddSource(source_pb2.AddSourceRequest(config=server))
        working = asyncio.create_task(worker.run())

        async def is_there() -> bool:
            assert not working.done()
            page = await tool_pb2_grpc.ToolServiceStub(channel).ListTools(tool_pb2.ListToolsRequest(page_size=200))
            return "wipe" in {tool.definition.name for tool in page.tools}

        try:
            await until(is_there)
            yield made
        finally:
            worker.drain()
            await working
            await sources.RemoveSource(source_pb2.RemoveSourceRequest(name=server.name))
