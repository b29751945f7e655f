"""One suite of real processes for all tests of this folder, with two replicas of agent-loop and of the gateway."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from pawl.event.v1 import call_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from tests.keys import LOCAL_KEY, keyed_channel
from tests.system.suite.client import Agent


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def suite() -> AsyncIterator[Suite]:
    """The suite, with the front-end tool `show_panel` registered.

    Its folder is not pytest's: that is closed to the account under which PostgreSQL runs when the tests run as root.
    """
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"agent-loop": 2, "gateway": 2},
            service_environment={
                "agent-loop": {"PAWL_MODEL_INPUT": "text,image"},
                "tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools,tests.system.suite.reversible_tools"},
            },
        )
        async with Suite(options) as suite:
            await _register_panel(suite.endpoints.services["tool-registry"][0].grpc)
            yield suite


@pytest_asyncio.fixture(loop_scope="session")
async def agent(suite: Suite) -> AsyncIterator[Agent]:
    """A client of the first replica."""
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        yield agent


@pytest_asyncio.fixture(loop_scope="session")
async def other_agent(suite: Suite) -> AsyncIterator[Agent]:
    """A client of the second replica."""
    async with Agent(suite.endpoints.services["agent-loop"][1].grpc) as agent:
        yield agent


async def _register_panel(address: str) -> None:
    definition = tool_pb2.ToolDefinition(
        name="show_panel",
        description="Shows something to the user.",
        arguments_schema_json=(
            b'{"type":"object","properties":{"title":{"type":"string"},"content":{"type":"string"}}}'
        ),
        context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        category=call_pb2.TOOL_CATEGORY_SAFE,
        effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT,
    )
    async with keyed_channel(address) as channel:
        stub = tool_pb2_grpc.ToolServiceStub(channel)
        await stub.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition, replace=True))
