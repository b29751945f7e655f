"""One suite of real processes for all tests of this folder, with two replicas of most services.

Killed processes write no coverage: test_crash.py and test_gateway.py, which kill, come before the files whose code in
the services is tested nowhere else.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from tests.keys import LOCAL_KEY, keyed_channel
from tests.mail_server import Postbox, mail_server
from tests.system.scripting import Model, scripted
from tests.system.suite.client import Agent, addresses

FORMS = {
    "show_panel": (call_pb2.OFFER_FALLBACK_UNSPECIFIED, ""),
    "form_that_fails": (call_pb2.OFFER_FALLBACK_FAIL, ""),
    "form_or_calculate": (call_pb2.OFFER_FALLBACK_BACKEND_TOOL, "calculate"),
    "form_or_ask": (call_pb2.OFFER_FALLBACK_ASK_USER, ""),
}
"""Front-end tools, and what happens when no client runs them."""


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def mails() -> AsyncIterator[tuple[Postbox, int]]:
    """The mail server of the notifier, and its port."""
    async with mail_server() as found:
        yield found


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def suite(mails: tuple[Postbox, int]) -> AsyncIterator[Suite]:
    """The suite, with front-end tools.

    Its folder is not pytest's: that is closed to the account under which PostgreSQL runs when the tests run as root.
    """
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"agent-loop": 2, "gateway": 2, "job-store": 2},
            service_environment={
                "agent-loop": {"PAWL_MODEL_INPUT": "text,image", "PAWL_TOOL_TIMEOUT_SECONDS": "100"},
                "job-store": {"PAWL_ACTIVE_RUNS_PER_USER": "40", "PAWL_ACTIVE_RUNS_PER_STORE": "40"},
                "notifier": {"PAWL_SMTP_URL": f"smtp://127.0.0.1:{mails[1]}"},
                "tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools,tests.system.suite.reversible_tools"},
            },
        )
        async with Suite(options) as suite:
            await _register_forms(suite)
            yield suite


@pytest_asyncio.fixture(loop_scope="session")
async def agent(suite: Suite) -> AsyncIterator[Agent]:
    """A client of the first replica."""
    async with Agent(addresses(suite)[0]) as agent:
        yield agent


@pytest_asyncio.fixture(loop_scope="session")
async def other_agent(suite: Suite) -> AsyncIterator[Agent]:
    """A client of the second replica."""
    async with Agent(addresses(suite)[1]) as agent:
        yield agent


@pytest_asyncio.fixture(loop_scope="session")
async def pawl(suite: Suite) -> AsyncIterator[AsyncClient]:
    """A patient client of all replicas."""
    elsewhere = {
        "PAWL_TOOL_REGISTRY_ADDRESS": addresses(suite, "tool-registry")[0],
        "PAWL_NOTIFIER_ADDRESS": addresses(suite, "notifier")[0],
    }
    async with AsyncClient(addresses(suite), api_key=LOCAL_KEY, retry_seconds=240.0, environment=elsewhere) as pawl:
        yield pawl


@pytest_asyncio.fixture(loop_scope="session")
async def model(suite: Suite) -> AsyncIterator[Model]:
    """The model server; afterwards it follows its rules again."""
    async with scripted(suite) as model:
        yield model


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    """A file for the effects of tools, which does not exist yet."""
    return tmp_path / "effects"


async def _register_forms(suite: Suite) -> None:
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        for name, (fallback, tool) in FORMS.items():
            texts = dict.fromkeys(("title", "content", "expression"), '{"type":"string"}')
            properties = ",".join(f'"{text}":{schema}' for text, schema in texts.items())
            definition = tool_pb2.ToolDefinition(
                name=name,
                description="Shows something to the user.",
                arguments_schema_json=f'{{"type":"object","properties":{{{properties}}}}}'.encode(),
                context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
                category=call_pb2.TOOL_CATEGORY_SAFE,
                effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT,
                offer_fallback=fallback,
                fallback_tool_name=tool,
            )
            request = tool_pb2.RegisterToolRequest(definition=definition)
            await tool_pb2_grpc.ToolServiceStub(channel).RegisterTool(request)
