"""A store-by-store rollout on two replicas, with a client that falls back to its own loop (LOOP-14, RES-3)."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from pawl.client import AsyncClient
from pawl.errors import FeatureOff
from pawl.event.v1 import run_pb2
from pawl.launcher.suite import Suite
from pawl.settings.v1 import settings_pb2 as pb
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.suite.client import addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Two of them are among the first ten percent of the switch `runs`.
STORES = [f"rollout-{number}" for number in range(8, 14)]


class FallingBack:
    """A client of one store that answers with its own loop where Pawl's runs are off."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.runs: list[str] = []

    async def ask(self, text: str) -> bool:
        """Answer a message, and return whether Pawl has answered it."""
        try:
            run = await self.client.start(text)
        except FeatureOff:
            return False
        self.runs.append(run.run_id)
        return True


async def test_a_rollout_goes_from_off_to_some_stores_to_all_and_back_without_losing_or_repeating_a_run(
    suite: Suite,
) -> None:
    async with AsyncExitStack() as stack:
        clients = {
            (store_id, address): FallingBack(
                await stack.enter_async_context(AsyncClient(address, api_key=LOCAL_KEY, store=store_id))
            )
            for store_id in STORES
            for address in addresses(suite)
        }
        job_store = {"PAWL_JOB_STORE_ADDRESS": addresses(suite, "job-store")[0]}
        operator = await stack.enter_async_context(AsyncClient(api_key=LOCAL_KEY, environment=job_store))

        async def set_runs(state: pb.SwitchState.ValueType, percent: int = 0) -> None:
            read = pb.GetSettingsRequest(layer=pb.SETTINGS_LAYER_DEPLOYMENT)
            settings = (await operator.settings.GetSettings(read)).settings
            runs = pb.Switch(state=state, percent=percent)
            asked = pb.Settings(layer=settings.layer, version=settings.version, switches={"runs": runs})
            await operator.settings.UpdateSettings(pb.UpdateSettingsRequest(settings=asked))

        async def follow() -> set[str]:
            """Ask in all stores through all replicas until these follow the switch; return the stores with runs."""
            explained = {
                store_id: (await operator.settings.ExplainSettings(pb.ExplainSettingsRequest(store_id=store_id)))
                for store_id in STORES
            }
            is_on = {store_id: answer.explanations[0].value == "on" for store_id, answer in explained.items()}

            async def agree() -> bool:
                by_pawl = {key: await client.ask("hello") for key, client in clients.items()}
                return all(by_pawl[key] is is_on[key[0]] for key in by_pawl)

            await until(agree)
            return {store_id for store_id in STORES if is_on[store_id]}

        try:
            phases = [(pb.SWITCH_STATE_OFF, 0), (pb.SWITCH_STATE_PERCENT, 10), (pb.SWITCH_STATE_PERCENT, 60)]
            phases += [(pb.SWITCH_STATE_ALL, 0), (pb.SWITCH_STATE_PERCENT, 10), (pb.SWITCH_STATE_OFF, 0)]
            on = []
            for state, percent in phases:
                await set_runs(state, percent)
                on.append(await follow())
        finally:
            # Later tests start runs through any replica.
            await set_runs(pb.SWITCH_STATE_ALL)
            await follow()
        assert on[0] == on[-1] == set()
        assert set() < on[1] == on[4] < on[2] < on[3] == set(STORES)
        for (store_id, _), client in clients.items():
            ended = [await client.client.result(run_id) for run_id in client.runs]
            assert {run.state for run in ended} <= {run_pb2.RUN_STATE_COMPLETED}, store_id
        for store_id in STORES:
            own = [client for (each, _), client in clients.items() if each == store_id]
            listed = [run.run_id async for run in own[0].client.runs()]
            assert sorted(listed) == sorted(run_id for client in own for run_id in client.runs), store_id


async def test_exported_conversation_continues_in_another_loop_and_can_be_imported_again(pawl: AsyncClient) -> None:
    run = await pawl.start("what is 17 * 23")
    await pawl.result(run.run_id)
    exported = await pawl.export_conversation(run.conversation_id)
    assert [message["role"] for message in exported] == ["user", "assistant", "tool", "assistant"]
    (call,) = exported[1]["tool_calls"]
    assert (exported[2]["tool_call_id"], "391" in exported[2]["content"]) == (call["id"], True)
    added = [{"role": "user", "content": "and by hand?"}, {"role": "assistant", "content": "391 too."}]
    imported = await pawl.import_conversation([*exported, *added])
    again = await pawl.export_conversation(imported.conversation_id)
    assert [each["content"] for each in again] == [each["content"] for each in [*exported, *added]]
