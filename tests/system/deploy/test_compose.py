"""docker-compose.yml works: its commands, environment and files start the suite, which answers a client."""

from __future__ import annotations

import httpx2
import pytest

from pawl.client import AsyncClient
from tests.system.deploy.conftest import KEY
from tests.system.deploy.containers import Containers

pytestmark = pytest.mark.long


async def test_containers_start_from_the_compose_file_and_answer_a_client(containers: Containers) -> None:
    for service in ("job-store", "tool-registry", "notifier", "agent-loop", "gateway", "mailbox"):
        await containers.start(service)
    async with AsyncClient([f"127.0.0.1:{containers.port(7601)}"], api_key=KEY) as pawl:
        run = await pawl.start("what is 17 * 23?")
        text = "".join([piece async for piece in pawl.text(run.run_id)])
    assert "391" in text
    async with httpx2.AsyncClient(trust_env=False) as http:
        for port in range(7610, 7616):
            assert (await http.get(f"http://127.0.0.1:{containers.port(port)}/metrics")).is_success
