"""A store-by-store rollout on two replicas, with a client that falls back to its own loop (LOOP-14, RES-3)."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import pytest

from pawl.client import AsyncClient
from pawl.errors import FeatureOff
from pawl.launcher.suite import Suite
from pawl.settings.v1 import settings_pb2 as pb
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.suite.client import addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

# One of them is among the ten percent of the switch `runs`.
STORES = [f"rollout-{number}" for number in range(12)]


class FallingBack:
    """A client of one store that answers with its own loop where Pawl's runs are off."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.own: list[str] = []
        self.runs: list[str] = []

    async def ask(self, text: str) -> bool:
        """Answer a message, and return whether Pawl has answered it."""
        try:
            run = await self._client.start(text, request_id=text)
        except FeatureOff:
            self.own.append(text)
            return False
        self.runs.append(run.run_id)
        return True


async def test_rollout_goes_from_off_to_some_stores_to_all_and_back_without_a_lost_or_repeated_run(
    suite: Suite, pawl: AsyncClient
) -> None:
    async with AsyncExitStack() as stack:
        clients = {
            (store_id, address): FallingBack(
                await stack.enter_async_context(AsyncClient(address, api_key=LOCAL_KEY, store=store_id))
            )
            for store_id in STORES
            for address in addresses(suite)
        }
        deployment = [
            await stack.enter_async_context(AsyncClient(api_key=LOCAL_KEY, environment={"PAWL_JOB_STORE_ADDRESS": each}))
            for each in addresses(suite, "job-store")
        ]

        async def set_runs(state: pb.SwitchState.ValueType, percent: int = 0) -> None:
            read = pb.GetSettingsRequest(layer=pb.SETTINGS_LAYER_DEPLOYMENT)
            settings = (await deployment[0].settings.GetSettings(read)).settings
            runs = pb.Switch(state=state, percent=percent)
            asked = pb.Settings(layer=settings.layer, version=settings.version, switches={"runs": runs})
            await deployment[0].settings.UpdateSettings(pb.UpdateSettingsRequest(settings=asked))

        async def asked(phase: str) -> set[str]:
            """Ask in all stores through all replicas until all of them follow the switch; return the stores with runs."""
            found: set[str] = set()
            numbers = Counter[str]()

            async def agree() -> bool:
                nonlocal found
                numbers[phase] += 1
                answered = {
                    key: await client.ask(f"{phase}-{numbers[phase]}-{number}")
                    for number, (key, client) in enumerate(clients.items())
                }
                found = {store_id for (store_id, _), is_pawl in answered.items() if is_pawl}
                return all(answered[key] is (key[0] in found) for key in answered)
            await until(agree)
            return found

        try:
            await set_runs(pb.SWITCH_STATE_OFF)
            ...
        finally:
            await set_runs(pb.SWITCH_STATE_ALL)
