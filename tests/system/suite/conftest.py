"""One suite of real processes for all tests of this folder, with two replicas of most services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from pawl.client import AsyncClient
from pawl.launcher.suite import Suite
from tests.fakes.otlp_receiver import Receiver, over_grpc
from tests.keys import LOCAL_KEY
from tests.servers import running_suite
from tests.system.scripting import Model, scripted
from tests.system.suite.client import Agent, addresses


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with over_grpc() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def suite(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    limits = tmp_path_factory.mktemp("limits") / "limits.json"
    limits.write_text('{"defaults": {"tool_timeout_seconds": 100}}')
    async with running_suite(
        local_key=LOCAL_KEY,
        replicas={"agent-loop": 2, "gateway": 2, "job-store": 2},
        service_environment={
            "agent-loop": {
                "PAWL_MODEL_INPUT": "text,image",
                "PAWL_LIMITS_FILE": str(limits),
                **receiver.environment,
            },
            "job-store": {"PAWL_ACTIVE_RUNS_PER_USER": "40", "PAWL_ACTIVE_RUNS_PER_STORE": "40"},
            "tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools"},
        },
    ) as suite:
        yield suite


@pytest_asyncio.fixture(loop_scope="session")
async def agent(suite: Suite) -> AsyncIterator[Agent]:
    async with Agent(addresses(suite)[0]) as agent:
        yield agent


@pytest_asyncio.fixture(loop_scope="session")
async def pawl(suite: Suite) -> AsyncIterator[AsyncClient]:
    elsewhere = {
        "PAWL_TOOL_REGISTRY_ADDRESS": addresses(suite, "tool-registry")[0],
        "PAWL_NOTIFIER_ADDRESS": addresses(suite, "notifier")[0],
    }
    async with AsyncClient(addresses(suite), api_key=LOCAL_KEY, retry_seconds=240.0, environment=elsewhere) as pawl:
        yield pawl


@pytest_asyncio.fixture(loop_scope="session")
async def model(suite: Suite) -> AsyncIterator[Model]:
    async with scripted(suite) as model:
        yield model
