"""Settings over real gRPC and a real database: switches and limits apply to all new work, on every replica."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pawl.chassis.identity.auth import user_principal
from pawl.chassis.ids import CredentialId, IdSource, StoreId, UserId
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.client import translated
from pawl.errors import Conflict, FeatureOff, InvalidField, ModelNotAllowed, StorageFull
from pawl.event.v1 import agent_pb2, call_pb2, message_pb2, run_pb2, schedule_pb2
from pawl.job.v1 import agents_pb2, ledger_pb2
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job.v1.models_pb2 import ReportModelServerRequest
from pawl.job.v1.models_pb2_grpc import ModelServiceStub
from pawl.job_store import sweeps
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.usage import day_end
from pawl.job_store.store_settings.rules import Layer, Settings, Switch, SwitchState
from pawl.settings.v1 import settings_pb2 as pb
from pawl.settings.v1.settings_pb2_grpc import SettingsServiceStub
from pawl.values import Feature
from tests.fakes.manual_clock import ManualClock
from tests.poll import until
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_background import asks_for, claimed_jobs, ended, start_jobs
from tests.rpc.job_store.test_forks import past_of
from tests.rpc.job_store.test_schedules import SKIPPED, Timer
from tests.rpc.job_store.test_triggers import Hook
from tests.rpc.job_store.user import User, result
from tests.rpc.refusals import raises

DEPLOYMENT = user_principal(
    StoreId(""), UserId("ops"), frozenset({"deployment"}), credential_id=CredentialId("key_ops")
)


async def switch(replica: Replica, feature: Feature, state: SwitchState, **fields: Any) -> Settings:
    current = replica.settings.all.layer(Layer.DEPLOYMENT, StoreId(""))
    asked = Settings(layer=Layer.DEPLOYMENT, version=current.version, switches={feature: Switch(state=state, **fields)})
    return await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)


async def test_no_run_starts_where_runs_are_off_while_other_stores_and_open_runs_continue(start: StartReplica) -> None:
    """LOOP-14: on all replicas, with a typed error; a repeated request has its first answer."""
    replica, other = await start(), await start()
    ann, off = User(replica.stub), User(other.stub)
    first = await ann.start(request_id="r1")
    await switch(replica, Feature.RUNS, SwitchState.LISTED, store_ids=frozenset({"beta"}))
    await other.settings.refresh()
    for user in (ann, off):
        refused = await raises(FeatureOff, user.submit(), match="'runs' is switched off for this store")
        assert refused.metadata["feature"] == "runs"
    await raises(FeatureOff, ann.stub.StartJob(asks_for(ann)))
    assert (await ann.submit("hello", request_id="r1")).run.run_id == first.run_id
    steered = await ann.submit("more", conversation_id=first.conversation_id, policy=ledger_pb2.MESSAGE_POLICY_STEER)
    assert (steered.run.run_id, steered.steered) == (first.run_id, True)
    undone = run_pb2.Undo(run_id=first.run_id)
    assert (await ann.submit("undo", conversation_id=first.conversation_id, undo=undone)).run.run_id
    await User(replica.stub, store_id="beta").submit()
    await switch(replica, Feature.RUNS, SwitchState.ALL)
    await ann.submit()


async def test_background_work_and_delegation_can_be_off_while_runs_are_on(replica: Replica, user: User) -> None:
    await switch(replica, Feature.BACKGROUND, SwitchState.OFF)
    await raises(FeatureOff, user.stub.StartJob(asks_for(user)), match="'background'")
    run = (await user.submit()).run
    assert (run.options.without_background, run.options.limits.HasField("agent_depth_max")) == (True, False)
    await switch(replica, Feature.BACKGROUND, SwitchState.ALL)
    await switch(replica, Feature.DELEGATION, SwitchState.OFF)
    run = (await user.submit(options=run_pb2.RunOptions(limits=run_pb2.RunLimits(agent_depth_max=2)))).run
    assert (run.options.without_background, run.options.limits.agent_depth_max) == (False, 0)


@pytest.mark.parametrize("feature", [Feature.RUNS, Feature.SCHEDULES, Feature.TRIGGERS])
async def test_firings_while_their_feature_is_off_are_skipped_and_do_not_count_as_failures(
    replica: Replica, feature: Feature
) -> None:
    timer, hook = Timer(replica), Hook(replica)
    await timer.put()
    await hook.put()
    await switch(replica, feature, SwitchState.OFF)
    fires = {Feature.SCHEDULES: await timer.fire_due(), Feature.TRIGGERS: (await hook.deliver(lane="a")).fire}
    for kind, fire in fires.items():
        is_off = feature in {kind, Feature.RUNS}
        assert (fire.outcome == SKIPPED) is is_off
        assert ("switched off" in fire.reason) is is_off
    assert [(await timer.get()).failures, (await hook.get()).failures] == [0, 0]


async def sweep_until(replica: Replica, user: User, run_id: str, state: run_pb2.RunState.ValueType) -> None:
    """Cancel the runs of stores where runs are off, until a run has this state."""
    sweep = asyncio.create_task(
        sweeps.cancel_where_off(replica.settings, replica.ledger, IdSource(SystemClock()), ManualClock())
    )

    async def has_state() -> bool:
        return (await user.run(run_id)).state == state

    await until(has_state)
    sweep.cancel()


async def test_open_runs_are_cancelled_where_runs_are_off_if_the_switch_requests_it(replica: Replica) -> None:
    ann, beta = User(replica.stub), User(replica.stub, store_id="beta")
    runs = [(ann, (await ann.submit()).run.run_id), (beta, (await beta.submit()).run.run_id)]
    await switch(replica, Feature.RUNS, SwitchState.LISTED, store_ids=frozenset({"beta"}), cancel_open_runs=True)
    await sweep_until(replica, ann, runs[0][1], run_pb2.RUN_STATE_CANCELLED)
    assert (await ann.run(runs[0][1])).stop_cause == run_pb2.STOP_CAUSE_FEATURE_OFF
    assert (await beta.run(runs[1][1])).state == run_pb2.RUN_STATE_QUEUED


async def test_notices_that_waited_while_runs_were_off_start_turns_once_runs_are_on(replica: Replica) -> None:
    """LOOP-14: in stores where runs stay off, they still wait. A second replica changes nothing."""
    ann, beta = User(replica.stub), User(replica.stub, store_id="beta")
    conversation_id, _ = [await start_jobs(user, user.store_id) for user in (ann, beta)]
    await switch(replica, Feature.RUNS, SwitchState.OFF)
    for run in await ann.claim("jobs", runs_max=2):
        job = {"acme": ann, "beta": beta}[run.store_id].owner(run.run_id, run.epoch)
        await job.commit(state=run_pb2.RUN_STATE_RUNNING)
        await ended(job)
    assert await ann.claim() == []
    await switch(replica, Feature.RUNS, SwitchState.LISTED, store_ids=frozenset({"acme"}))
    active = "SELECT count(*) FROM job_store.conversations WHERE active_run_id IS NOT NULL"
    for _ in range(2):
        sweep = asyncio.create_task(sweeps.start_turns_where_on(replica.settings, replica.ledger, ManualClock(0)))
        async with asyncio.timeout(60):
            while not await replica.database.fetchval(active):
                await asyncio.sleep(0.02)
        sweep.cancel()
    (claimed,) = await ann.claim(runs_max=5)
    assert (await ann.run(claimed.run_id)).conversation_id == conversation_id


async def test_a_stores_own_limits_decide_how_many_of_its_runs_can_be_claimed(start: StartReplica) -> None:
    replica = await start(slots=SlotLimits(per_store=3, per_user=3))
    users = {store_id: User(replica.stub, store_id=store_id) for store_id in ("acme", "beta", "gamma")}
    for layer, store_id, number in ((Layer.CEILING, "acme", 1), (Layer.CEILING, "beta", 5)):
        limits = {"active_runs": number, "active_runs_per_user": number}
        asked = Settings(layer=layer, store_id=StoreId(store_id), limits=limits)
        await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)
    for user in users.values():
        for _ in range(6):
            await user.submit()
    claimed = await users["acme"].claim(runs_max=20)
    assert {store_id: sum(run.store_id == store_id for run in claimed) for store_id in users} == {
        "acme": 1,
        "beta": 5,
        "gamma": 3,
    }


async def test_tokens_of_all_runs_count_once_toward_the_budgets_of_their_store_and_user(replica: Replica) -> None:
    """Also under concurrent commits. Runs that wait for a budget check it again once it is raised."""
    stub, agents = SettingsServiceStub(replica.channel), AgentLedgerServiceStub(replica.channel)
    ann, bob = User(replica.stub), User(replica.stub, user_id="bob")
    owners = [await user.start() for user in (ann, ann, bob)]
    usage, delegated = run_pb2.Usage(input_tokens=90, output_tokens=20), run_pb2.Usage(input_tokens=10)
    await asyncio.gather(*(owner.commit(usage=usage, delegated_usage=delegated) for owner in owners))
    await replica.database.execute(
        "UPDATE job_store.token_days SET day = date_trunc('month', day) WHERE user_id = 'bob'"
    )

    async def limit(layer: pb.SettingsLayer.ValueType, **limits: int) -> None:
        store_id = "" if layer == pb.SETTINGS_LAYER_DEPLOYMENT else "acme"
        current = await stub.GetSettings(pb.GetSettingsRequest(layer=layer, store_id=store_id))
        asked = pb.Settings(layer=layer, store_id=store_id, version=current.settings.version, limits=limits)
        await translated(stub.UpdateSettings(pb.UpdateSettingsRequest(settings=asked)))

    async def budgets(user_id: str) -> dict[int, tuple[int, int]]:
        asked = agents_pb2.GetModelTermsRequest(store_id="acme", user_id=user_id)
        return {each.kind: (each.tokens_max, each.tokens_used) for each in (await agents.GetModelTerms(asked)).budgets}

    assert await budgets("ann") == {}
    await limit(pb.SETTINGS_LAYER_DEPLOYMENT, monthly_tokens=1000, monthly_tokens_per_user=100)
    await limit(pb.SETTINGS_LAYER_CEILING, daily_tokens=300)
    month, of_user = run_pb2.WAIT_KIND_STORE_MONTHLY_TOKENS, run_pb2.WAIT_KIND_USER_MONTHLY_TOKENS
    daily = run_pb2.WAIT_KIND_STORE_DAILY_TOKENS
    assert await budgets("ann") == {month: (1000, 300), of_user: (100, 200), daily: (300, 300)}
    assert await budgets("bob") == {month: (1000, 300), of_user: (100, 100), daily: (300, 300)}
    explained = await stub.ExplainSettings(pb.ExplainSettingsRequest(store_id="acme"))
    texts = {each.name: (each.value, each.reason) for each in explained.explanations}
    assert texts["daily_tokens_per_user"] == ("unlimited", "No layer sets it.")
    midnight = f"{day_end(datetime.now(UTC)):%Y-%m-%d} 00:00 UTC."
    assert texts["daily_tokens"][1].endswith(f"The store has used it up. It is renewed at {midnight}")
    assert "The store has used 300 tokens. A new period" in texts["monthly_tokens"][1]
    assert texts["monthly_tokens_per_user"] == ("100", "Set for all stores."), "the caller is no user of the store"

    # One run is parked before the budget is raised, and another one, which has just read the old budget, afterwards.
    await owners[0].park(daily, wake_time=datetime.now(UTC) + timedelta(days=1))
    poll = asyncio.create_task(replica.settings.run())
    await limit(pb.SETTINGS_LAYER_CEILING, daily_tokens=301)
    claimed = list[str]()
    async with asyncio.timeout(60):
        while len(claimed) < 2:
            if found := [run.run_id for run in await ann.claim()]:
                claimed += found
                if len(claimed) == 1:
                    await owners[1].park(daily, wake_time=datetime.now(UTC) + timedelta(days=1))
            await asyncio.sleep(0.02)
    poll.cancel()
    assert claimed == [owners[0].run_id, owners[1].run_id]


async def test_limits_of_new_runs_are_lowered_to_those_of_their_store_and_the_run_says_so(
    replica: Replica, user: User
) -> None:
    asked = Settings(layer=Layer.DEPLOYMENT, limits={"rounds_max": 20, "total_tokens_max": 500, "agent_depth_max": 1})
    await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)
    own = Settings(layer=Layer.STORE, store_id=StoreId("acme"), limits={"rounds_max": 8})
    await replica.settings.update(DEPLOYMENT, own, (), only_check=False)
    limits = run_pb2.RunLimits(rounds_max=50, agent_depth_max=0, run_timeout_seconds=60)
    run = (await user.submit(options=run_pb2.RunOptions(limits=limits))).run
    kept = run.options.limits
    assert (kept.rounds_max, kept.total_tokens_max, kept.agent_depth_max, run.token_budget) == (8, 500, 0, 500)
    assert dict(run.lowered_limits) == {"rounds_max": 50, "total_tokens_max": 0, "topped_up_tokens_max": 0}
    of_beta = (await User(replica.stub, store_id="beta").submit(options=run_pb2.RunOptions(limits=limits))).run
    assert (of_beta.options.limits.rounds_max, kept.run_timeout_seconds) == (20, 60)


async def test_models_that_a_store_may_not_use_are_refused_for_runs_and_agents(replica: Replica, user: User) -> None:
    large: Any = {"options": run_pb2.RunOptions(model="small", model_fallbacks=["large"])}
    earlier = await user.submit(request_id="r1", **large)
    deployed = Settings(layer=Layer.DEPLOYMENT, models=("small", "tiny"), model_server="eu")
    await replica.settings.update(DEPLOYMENT, deployed, (), only_check=False)
    assert (await user.submit(request_id="r1", **large)).run.run_id == earlier.run.run_id
    agents = AgentLedgerServiceStub(replica.channel)
    definition = agent_pb2.AgentDefinition(name="clerk", options=run_pb2.RunOptions(model="large"))
    asked: Any = {"store_id": "acme", "user_id": "ann", "definition": definition, "validate_only": True}
    for refused in (
        user.submit(**large),
        translated(agents.PutAgent(agents_pb2.PutAgentRequest(**asked))),
        translated(agents.PutDraft(agents_pb2.PutDraftRequest(**asked))),
    ):
        assert (await raises(ModelNotAllowed, refused)).metadata["model"] == "large"
    await user.submit(options=run_pb2.RunOptions(model="tiny"))
    terms = await agents.GetModelTerms(agents_pb2.GetModelTermsRequest(store_id="acme", user_id="ann"))
    assert (list(terms.models), terms.model_server, list(terms.budgets)) == (["small", "tiny"], "eu", [])
    request = pb.ExplainSettingsRequest(store_id="acme")
    explained = (await SettingsServiceStub(replica.channel).ExplainSettings(request)).explanations
    assert [(each.name, each.value) for each in explained[-2:]] == [("models", "small, tiny"), ("model_server", "eu")]


async def test_a_full_store_starts_no_run_until_data_is_deleted_or_its_limit_is_raised(
    replica: Replica, user: User
) -> None:
    async def limit(stored_bytes: int, version: int) -> None:
        asked = Settings(layer=Layer.DEPLOYMENT, version=version, limits={"stored_bytes": stored_bytes})
        await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)

    owner, beta = await user.start("x" * 1000, request_id="r1"), User(replica.stub, store_id="beta")
    call = owner.call("c1", call_pb2.CALL_STATE_FAILED, result=result())
    await owner.commit(calls=[call], messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="z")])
    columns = {"messages": "body", "events": "events", "calls": "arguments || coalesce(result, '')"}
    sizes = [
        await replica.database.fetchval(f"SELECT sum(octet_length({column})) FROM job_store.{table}")  # noqa: S608
        for table, column in columns.items()
    ]
    await limit(sum(sizes), 0)
    await beta.submit()
    await replica.settings.count_stored_bytes()
    for refused in (
        user.submit(),
        user.stub.StartJob(asks_for(user)),
        user.stub.ImportConversation(past_of(user)),
    ):
        await raises(StorageFull, refused)
    assert (await user.submit("x" * 1000, request_id="r1")).run.run_id == owner.run_id
    assert (await user.submit("undo", undo=run_pb2.Undo(run_id=owner.run_id))).run.run_id
    await beta.submit()
    asked = pb.ExplainSettingsRequest(store_id="acme")
    explained = (await SettingsServiceStub(replica.channel).ExplainSettings(asked)).explanations
    (size,) = (each for each in explained if each.name == "stored_bytes")
    assert (size.value, f"has {sum(sizes)} bytes" in size.reason) == (str(sum(sizes)), True)
    await limit(10**6, 1)
    await user.submit()
    await limit(sum(sizes), 2)
    await raises(StorageFull, user.submit())
    await replica.database.execute("DELETE FROM job_store.events WHERE store_id = 'acme'")
    await replica.settings.count_stored_bytes()
    await user.submit()


async def test_a_setting_can_name_only_a_model_server_that_an_agent_loop_has_reported(replica: Replica) -> None:
    async def named(server: str, version: int) -> None:
        asked = Settings(layer=Layer.DEPLOYMENT, model_server=server, version=version)
        await replica.settings.update(DEPLOYMENT, asked, (), only_check=False)

    await named("early", 0)
    report = ReportModelServerRequest(known_servers=["default", "eu"])
    await ModelServiceStub(replica.channel).ReportModelServer(report)
    with pytest.raises(InvalidField, match="'moon' is not in agent-loop's limits file: use default, eu"):
        await named("moon", 1)
    await named("eu", 1)
    assert replica.settings.limits_of(StoreId("acme")).model_server == "eu"


async def test_one_of_two_concurrent_changes_conflicts_and_the_other_is_recorded(replica: Replica) -> None:
    stub = SettingsServiceStub(replica.channel)

    async def change(percent: int) -> Any:
        runs = pb.Switch(state=pb.SWITCH_STATE_PERCENT, percent=percent)
        settings = pb.Settings(layer=pb.SETTINGS_LAYER_DEPLOYMENT, switches={"runs": runs})
        return await translated(stub.UpdateSettings(pb.UpdateSettingsRequest(settings=settings)))

    await raises(InvalidField, change(101), match="at most 100, got 101")
    done = await asyncio.gather(change(10), change(20), return_exceptions=True)
    (kept,) = (each.settings for each in done if not isinstance(each, BaseException))
    assert [type(each) for each in done if isinstance(each, BaseException)] == [Conflict]
    read = await stub.GetSettings(pb.GetSettingsRequest(layer=pb.SETTINGS_LAYER_DEPLOYMENT))
    assert (read.settings, kept.version) == (kept, 1)
    (row,) = (await stub.ListSettingsChanges(pb.ListSettingsChangesRequest())).changes
    percent = kept.switches["runs"].percent
    assert (dict(row.before), dict(row.after)) == ({}, {"runs": f"on for {percent} % of stores"})
    assert (row.user_id, row.layer) == ("me", pb.SETTINGS_LAYER_DEPLOYMENT)
    explained = (await stub.ExplainSettings(pb.ExplainSettingsRequest(store_id="acme"))).explanations
    assert explained[0].reason == f"The switch is on for {percent} % of stores."
    values = ["on"] * 4 + ["1000", "1000", "100"] + ["unlimited"] * 17 + ["30", "1", "1", "all", "default"]
    assert [each.value for each in explained[1:]] == values


async def test_settings_that_cannot_be_read_stay_unchanged(
    replica: Replica, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    await switch(replica, Feature.RUNS, SwitchState.OFF)
    replica.settings._clock = ManualClock()

    async def fails(_change: int) -> Any:
        raise Conflict("no")

    monkeypatch.setattr(replica.settings.repository, "changed_layers", fails)
    poll = asyncio.create_task(replica.settings.run())
    await asyncio.sleep(0)
    await raises(FeatureOff, user.submit())
    assert not poll.done()
    poll.cancel()


async def test_cancelling_open_runs_includes_jobs_of_ended_parents_but_not_undo_runs(replica: Replica) -> None:
    """A job that a model started outlives its parent run and is cancelled too. An undo continues."""
    ann = User(replica.stub)
    await start_jobs(ann, "one")
    (job,) = await claimed_jobs(ann)
    undo = (await ann.submit("undo", undo=run_pb2.Undo(run_id=job.run_id))).run
    await switch(replica, Feature.RUNS, SwitchState.OFF, cancel_open_runs=True)
    await sweep_until(replica, ann, job.run_id, run_pb2.RUN_STATE_CANCELLING)
    await job.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=[command.command_id for command in await job.inbox()])
    assert (await ann.run(job.run_id)).stop_cause == run_pb2.STOP_CAUSE_FEATURE_OFF
    assert (await ann.run(undo.run_id)).state == run_pb2.RUN_STATE_QUEUED


async def test_a_read_that_overlaps_a_change_does_not_lose_a_layer(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await switch(replica, Feature.RUNS, SwitchState.OFF)
    read, go = asyncio.Event(), asyncio.Event()
    real = replica.settings.repository.changed_layers

    async def slow(after_change: int) -> Any:
        found = await real(after_change)
        read.set()
        await go.wait()
        return found

    monkeypatch.setattr(replica.settings.repository, "changed_layers", slow)
    poll = asyncio.create_task(replica.settings.refresh())
    await read.wait()
    asked = [Settings(layer=Layer.CEILING, store_id=StoreId(name), limits={"active_runs": 7}) for name in ("a", "b")]
    changes = [asyncio.create_task(replica.settings.update(DEPLOYMENT, each, (), only_check=False)) for each in asked]
    go.set()
    await asyncio.gather(poll, *changes)
    assert Feature.RUNS in replica.settings.all.off(StoreId("acme"))
    assert set(replica.settings.slots.overrides) == {"a", "b"}


async def test_a_firing_that_will_be_skipped_does_not_cancel_an_earlier_run(replica: Replica) -> None:
    timer = Timer(replica)
    await timer.put(overlap=schedule_pb2.SCHEDULE_OVERLAP_CANCEL)
    first = await timer.fire_due()
    await switch(replica, Feature.RUNS, SwitchState.OFF)
    assert (await timer.fire_due()).outcome == SKIPPED
    assert (await User(replica.stub).run(first.run_id)).state == run_pb2.RUN_STATE_QUEUED


async def test_reports_of_jobs_start_no_turn_where_runs_are_off(replica: Replica, user: User) -> None:
    conversation_id = await start_jobs(user, "a", "b")
    for job, state, turns in zip(await claimed_jobs(user, 2), (SwitchState.OFF, SwitchState.ALL), (0, 1), strict=True):
        await switch(replica, Feature.RUNS, state)
        await ended(job)
        assert len((await user.ask("ListRuns", conversation_id=conversation_id)).runs) == 1 + turns
