"""Token budgets: exceeded by at most the running model call (LOOP-12, I18)."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import AgentDefinition, ToolSelection
from pawl.agent_loop.loop.drive import DriveEnd
from pawl.agent_loop.loop.metrics import PrometheusMeter
from pawl.agent_loop.loop.rules import budget, loop_state
from pawl.agent_loop.loop.rules.fact import RoundEnded, RoundRetrying, RoundStarted, Warned
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED
from pawl.agent_loop.loop.rules.run import PinnedAgent, RunOptions, TokenBudgetPolicy
from pawl.agent_loop.loop.rules.state import MODEL
from pawl.agent_loop.model.request import UsageReport
from pawl.agent_loop.model.shared import CountedCall, PerMinute, SharedModels
from pawl.chassis.ids import RunKey, StoreId
from pawl.errors import Unavailable
from pawl.event.v1 import run_pb2
from pawl.job.v1.agents_pb2 import TokenBudget
from pawl.job.v1.models_pb2 import TakeModelCallRequest, TakeModelCallResponse
from pawl.server.process.metrics import Metrics
from pawl.values import RunState, Usage, WaitKind
from tests.fakes.loop_world import STORE, World
from tests.fakes.model import fails, says
from tests.tables import for_each
from tests.unit.agent_loop.scenario import VERDICTS, present
from tests.unit.agent_loop.simulation import TOKENS_PER_ANSWER, Simulation, answer, run_state
from tests.unit.agent_loop.test_sub_agents import ANN

FAIL = TokenBudgetPolicy.FAIL


def with_budget(
    tokens: int, *names: str, policy: TokenBudgetPolicy = TokenBudgetPolicy.WAIT, ceiling: int = 0
) -> Simulation:
    """Return a run whose model was called. The first answer calls these tools."""
    limits = Limits(total_tokens_max=tokens, topped_up_tokens_max=ceiling)
    options = RunOptions(limits=limits, token_budget_policy=policy)
    run = Simulation([answer(*names)] if names else [], options)
    run.turn()
    return run


def used_up() -> Simulation:
    run = with_budget(TOKENS_PER_ANSWER, "serial")
    run.model_answers()
    return run


class TestExhaustion:
    def test_a_failed_attempt_counts_and_is_not_retried_if_the_budget_is_used_up(self) -> None:
        run = with_budget(TOKENS_PER_ANSWER)
        run.model_fails()
        assert (run.model_calls, run.run.state) == (1, RunState.WAITING)
        assert run.run.usage.total_tokens == TOKENS_PER_ANSWER

    @pytest.mark.parametrize(("ceiling", "fails"), [(TOKENS_PER_ANSWER, True), (TOKENS_PER_ANSWER + 1, False)])
    def test_a_run_that_no_top_up_can_save_fails_without_waiting(self, ceiling: int, fails: bool) -> None:
        run = with_budget(TOKENS_PER_ANSWER, ceiling=ceiling)
        run.model_fails()
        assert run.run.state is (RunState.FAILED if fails else RunState.WAITING)
        if fails:
            failure = present(run.run.failure)
            assert (failure.reason, f"to at most {ceiling}" in failure.message) == (BUDGET_EXHAUSTED, True)


class TestTopUps:
    def test_a_parked_run_resumes_with_the_next_round(self) -> None:
        run = used_up()
        run.ends(run.calls[0].call_id)
        assert (run.model_calls, run.parked, run.run.waits) == (1, True, (WaitKind.BUDGET,))
        run.tops_up(1)
        assert (run.run.state, run.run.waits, run.under_way) == (RunState.RUNNING, (), {MODEL})
        assert [event.round for event in run.events if isinstance(event, RoundStarted)] == [1, 2]

    def test_a_top_up_survives_a_takeover(self) -> None:
        run = used_up()
        run.tops_up(100)
        run.base = replace(run.base, loop=loop_state.read(loop_state.write(run.base.loop)))
        run.is_taken_over()
        assert budget.tokens(run.base) == TOKENS_PER_ANSWER + 100


class TestAccounting:
    def test_every_attempt_and_round_reports_its_usage(self) -> None:
        run = with_budget(0, "serial")
        run.model_fails()
        run.model_answers()
        run.ends(run.calls[0].call_id)
        run.model_answers()
        events = [event.usage for event in run.events if isinstance(event, RoundRetrying | RoundEnded)]
        each = Usage(input_tokens=10, output_tokens=5, model_calls=1)
        assert (events, run.run.usage) == ([each] * 3, each + each + each)

    def test_an_interrupted_model_call_counts_at_least_its_prompt(self) -> None:
        run = with_budget(TOKENS_PER_ANSWER)
        run.is_taken_over()
        used = run.run.usage
        assert (used.model_calls, used.estimated_tokens) == (1, used.input_tokens)
        assert used.input_tokens

    @pytest.mark.parametrize(
        ("report", "counted"),
        [
            (UsageReport(), UsageReport(input_tokens=34, output_tokens=4, estimated_tokens=38)),
            (
                UsageReport(input_tokens=30, cached_input_tokens=20),
                UsageReport(
                    input_tokens=30, cached_input_tokens=20, output_tokens=4, estimated_tokens=4, prompt_bytes=100
                ),
            ),
            (
                UsageReport(input_tokens=30, output_tokens=9, reasoning_tokens=7),
                UsageReport(input_tokens=30, output_tokens=9, reasoning_tokens=7, prompt_bytes=100),
            ),
        ],
    )
    def test_only_unreported_usage_is_estimated_and_marked_as_an_estimate(
        self, report: UsageReport, counted: UsageReport
    ) -> None:
        assert budget.counted(report, prompt_bytes=100, output_bytes=12) == counted


@for_each(
    ("reported", "prompt_bytes", "tokens"),
    [(250, 1000, 250), (250, 1300, 350), (250, 900, 250), (700, 1300, 800), (5, 1000, 125), (5, 1300, 163)],
)
def test_only_messages_since_the_last_report_are_estimated(reported: int, prompt_bytes: int, tokens: int) -> None:
    """Text with many tokens is estimated as such, and implausibly low counts from a server are ignored."""
    usage = UsageReport(input_tokens=reported, output_tokens=1, prompt_bytes=1000)
    run = Simulation([replace(answer("serial"), usage=usage)], RunOptions(limits=Limits(total_tokens_max=10_000)))
    run.turn()
    run.model_answers()
    assert budget.prompt_tokens(run.base, prompt_bytes) == tokens


@for_each(("tokens", "asked", "sent"), [(0, None, None), (0, 50, 50), (100, None, 100), (100, 50, 50), (100, 200, 100)])
def test_output_is_limited_to_the_remaining_budget(tokens: int, asked: int | None, sent: int | None) -> None:
    run = Simulation([], RunOptions(limits=Limits(total_tokens_max=tokens), output_tokens_max=asked))
    run.turn()
    assert budget.output_tokens_max(run.base, 0) == sent


@for_each(("prompt", "sent"), [(0, 100), (40, 60), (98, 2), (99, 1)])
def test_the_prompt_is_reserved_before_the_output(prompt: int, sent: int) -> None:
    base = with_budget(100).base
    assert (budget.needed(base, prompt), budget.output_tokens_max(base, prompt)) == (0, sent)


def test_a_model_call_over_the_remaining_budget_is_not_made() -> None:
    """I18: tool descriptions are part of the cost of a request."""
    run = with_budget(100)
    assert budget.needed(run.base, 100) == 101
    run.needs(101)
    assert (run.run.state, run.run.waits, run.parked) == (RunState.WAITING, (WaitKind.BUDGET,), True)
    assert (run.run.usage, run.run.tokens_needed) == (Usage(), 1)
    (events,) = [event for event in run.events if isinstance(event, Warned)]
    assert events.message.startswith("The next model call needs about 101 tokens")
    run.is_taken_over()
    assert run_state(run) is RunState.WAITING
    run.tops_up(1)
    assert (run.under_way, run.base.loop.model_call and run.base.loop.model_call.attempt) == ({MODEL}, 1)
    assert run.run.tokens_needed == 0


@for_each(("used", "needed", "missing"), [(90, 50, 40), (90, 0, 1), (100, 0, 1), (100, 50, 50)])
def test_the_missing_tokens_are_the_required_tokens_minus_the_remaining_ones(
    used: int, needed: int, missing: int
) -> None:
    base = with_budget(100).base
    run = replace(base.run, usage=Usage(input_tokens=used))
    loop = replace(base.loop, model_call=loop_state.OpenModelCall(attempt=1, tokens_needed=needed))
    assert budget.missing(replace(base, run=run, loop=loop)) == missing


def test_a_run_that_fails_because_of_its_budget_reports_the_cost() -> None:
    run = with_budget(100, policy=FAIL)
    run.needs(5721)
    message = present(run.run.failure).message
    assert run.run.state is RunState.FAILED
    assert all(part in message for part in ("needs about 5721 tokens", "100 of the budget's 100 are left"))


@pytest.mark.parametrize(("asked", "is_cut"), [(None, True), (100, False), (50, False)])
def test_an_answer_cut_short_by_the_budget_is_discarded(asked: int | None, is_cut: bool) -> None:
    """If the user's own limit was tighter than the budget, the answer is valid."""
    run = Simulation([], RunOptions(limits=Limits(total_tokens_max=100), output_tokens_max=asked))
    run.turn()
    sent = budget.output_tokens_max(run.base, 0)
    problem = budget.cut_short(run.base, replace(answer(text="half"), finish_reason="length"), sent)
    assert (problem is not None) is is_cut
    assert budget.cut_short(run.base, answer(text="whole"), sent) is None


# Agent quotas: once an agent's runs have used their daily quota, no model call starts (I18).


CLERK = PinnedAgent(name="clerk", version=1)


async def world_with_quota(
    tokens: int, used: int, policy: TokenBudgetPolicy = TokenBudgetPolicy.WAIT
) -> tuple[World, RunKey]:
    """Return a world whose agent has used so many of its daily tokens, and a run of the agent."""
    world = World(VERDICTS, [says("Done.")])
    definition = AgentDefinition(name="clerk", tools=ToolSelection(names=("look",)), daily_tokens_max=tokens)
    await world.agents.put(ANN, definition, ("look",), draft=False, validate_only=False)
    use(world, used)
    world.agents.usage.day_end_time = world.ledger.time() + timedelta(hours=1)
    return world, world.ledger.submit("hello", RunOptions(token_budget_policy=policy), agent=CLERK)


def use(world: World, tokens: int) -> None:
    world.agents.usage.tokens_today[StoreId(STORE), "clerk"] = tokens


async def test_a_run_with_an_exhausted_agent_quota_waits_for_the_next_day() -> None:
    world, key = await world_with_quota(100, used=100)

    assert await world.drive() is DriveEnd.PARKED

    run = world.ledger.run(key)
    assert (run.state, run.waits, len(world.model.requests)) == (RunState.WAITING, (WaitKind.AGENT_QUOTA,), 0)
    waits = [300, 1200, 2100]
    day_end = world.agents.usage.day_end_time
    for seconds in waits:
        row = world.ledger.row(key)
        assert row.claim_at is not None
        assert abs((row.claim_at - world.ledger.time()).total_seconds() - seconds) < 1
        if seconds != waits[-1]:
            await world.drive()
    assert world.ledger.row(key).claim_at == day_end
    (warned,) = [event for event in world.ledger.events(key) if isinstance(event, Warned)]
    assert warned.reason == "AGENT_QUOTA_EXHAUSTED"
    # The next day.
    use(world, 0)
    assert await world.drive() is DriveEnd.ENDED
    assert world.ledger.time() >= world.agents.usage.day_end_time
    assert (world.ledger.run(key).output_text, len(world.model.requests)) == ("Done.", 1)


async def test_a_run_may_fail_instead_if_its_agents_quota_is_exhausted() -> None:
    world, key = await world_with_quota(100, used=101, policy=TokenBudgetPolicy.FAIL)
    await world.finish(key)
    run = world.ledger.run(key)
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, "AGENT_QUOTA_EXHAUSTED")


@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        (WaitKind.STORE_DAILY_TOKENS, "STORE_TOKENS_EXHAUSTED", "The store's runs have used up the daily"),
        (
            WaitKind.USER_MONTHLY_TOKENS,
            "USER_TOKENS_EXHAUSTED",
            "This user's runs have used up the monthly",
        ),
    ],
)
@pytest.mark.parametrize("policy", [TokenBudgetPolicy.WAIT, TokenBudgetPolicy.FAIL])
async def test_a_run_without_an_agent_has_the_budgets_of_its_store_and_user(
    kind: WaitKind, reason: str, text: str, policy: TokenBudgetPolicy
) -> None:
    """I18."""
    world = World(VERDICTS, [says("Done.")])
    world.agents.limits = dataclasses.replace(world.agents.limits, tokens={WaitKind.STORE_MONTHLY_TOKENS: 100, kind: 9})
    world.agents.usage.tokens_today[StoreId(STORE), ""] = 9
    world.agents.usage.day_end_time = world.ledger.time() + timedelta(hours=1)
    key = world.ledger.submit("hello", RunOptions(token_budget_policy=policy))
    if policy is TokenBudgetPolicy.FAIL:
        await world.finish(key)
        failure = present(world.ledger.run(key).failure)
        assert (failure.reason, failure.message) == (reason, f"{text} budget of 9 tokens (UTC).")
        return
    assert await world.drive() is DriveEnd.PARKED
    assert world.ledger.run(key).waits == (kind,)
    world.agents.limits = dataclasses.replace(world.agents.limits, tokens={kind: 10})
    assert await world.drive() is DriveEnd.ENDED
    assert (world.ledger.run(key).output_text, len(world.model.requests)) == ("Done.", 1)


async def test_a_model_call_uses_the_stores_server_and_only_its_models() -> None:
    """A model that the store may no longer use is not called, and the run falls back to an allowed one."""
    world = World(VERDICTS, [says("Done."), says("Done.")])
    world.agents.limits = dataclasses.replace(world.agents.limits, models=frozenset({"small"}), model_server="eu")
    await world.finish(world.ledger.submit("hello", RunOptions(model="large", model_fallbacks=("small",))))
    assert [(each.model, each.server) for each in world.model.requests] == [("small", "eu")]
    key = world.ledger.submit("hello", RunOptions(model="large"))
    await world.finish(key)
    assert (present(world.ledger.run(key).failure).reason, len(world.model.requests)) == ("MODEL_NOT_ALLOWED", 1)


class Refusing:
    """Refuses the first calls, and records the tokens that are counted and the runs whose calls have ended."""

    def __init__(self, *refused: TakeModelCallResponse) -> None:
        self.refused = list(refused)
        self.taken: list[CountedCall] = []
        self.asked: list[dict[str, Any]] = []
        self.ended: dict[str, tuple[CountedCall, int]] = {}
        self.world: World
        self.key: RunKey

    def is_rated(self, _server: str) -> bool:
        return True

    async def take(self, model_call_id: str, call: CountedCall, **more: Any) -> TakeModelCallResponse:
        self.asked.append(more)
        if self.refused:
            return self.refused.pop(0)
        self.taken.append(call)
        return TakeModelCallResponse()

    def used(self, model_call_id: str, call: CountedCall) -> None:
        self.ended[model_call_id] = call, self.world.ledger.run(self.key).usage.total_tokens


@pytest.mark.parametrize("policy", TokenBudgetPolicy)
async def test_a_run_waits_for_the_limits_per_minute_and_counts_all_tokens(policy: TokenBudgetPolicy) -> None:
    world = World(VERDICTS, [says("Done.")])
    shared: Any = Refusing(*[TakeModelCallResponse(wait_seconds=10)] * 2)
    metrics = Metrics("agent_loop")
    meter = PrometheusMeter(metrics, "models.example", world.clock.monotonic)
    world.dependencies = dataclasses.replace(world.dependencies, shared=shared, meter=meter)
    shared.world, shared.key = world, world.ledger.submit("hello", RunOptions(token_budget_policy=policy))
    key = shared.key
    assert await world.drive() is DriveEnd.PARKED
    assert (world.ledger.run(key).waits, world.model.requests) == ((WaitKind.RATE,), [])
    assert (await world.drive(), await world.drive()) == (DriveEnd.PARKED, DriveEnd.ENDED)
    (warned,) = [event for event in world.ledger.events(key) if isinstance(event, Warned)]
    assert (warned.reason, len(world.model.requests)) == ("RATE_LIMITED", 1)
    ((ended, tokens_in_ledger),) = shared.ended.values()
    assert shared.taken[0].tokens + ended.tokens == tokens_in_ledger == world.ledger.run(key).usage.total_tokens
    samples = [each for family in metrics.registry.collect() for each in family.samples]
    counted = [
        (*each.labels.values(), each.value) for each in samples if each.name.endswith(("_calls_total", "_waits_total"))
    ]
    assert counted == [("store", "models.example", "answered", 1), ("rate", 2)], "only calls that were made count"


async def test_a_run_waits_briefly_for_tokens_that_calls_in_progress_have_reserved() -> None:
    """I18: it never fails for this, and its waits for a minute's limit do not lengthen its waits for a budget."""
    world = World(VERDICTS, [says("Done.")])
    world.agents.limits = dataclasses.replace(world.agents.limits, tokens={WaitKind.STORE_DAILY_TOKENS: 100})
    world.agents.usage.day_end_time = world.ledger.time() + timedelta(hours=1)
    reserved = TokenBudget(kind=run_pb2.WAIT_KIND_STORE_DAILY_TOKENS, tokens_max=100, tokens_used=40)
    used_up = TokenBudget(kind=run_pb2.WAIT_KIND_STORE_DAILY_TOKENS, tokens_max=100, tokens_used=100)
    used_up.end_time.FromDatetime(world.agents.usage.day_end_time)
    waits = [TakeModelCallResponse(wait_seconds=1)] * 3
    shared: Any = Refusing(*waits, *(TakeModelCallResponse(budget=each) for each in (reserved, used_up)))
    world.dependencies = dataclasses.replace(world.dependencies, shared=shared)
    options = RunOptions(token_budget_policy=TokenBudgetPolicy.FAIL, output_tokens_max=7)
    shared.world, shared.key = world, world.ledger.submit("hello", options)
    for _ in waits:
        assert await world.drive() is DriveEnd.PARKED
    assert await world.drive() is DriveEnd.PARKED
    assert world.ledger.run(shared.key).waits == (WaitKind.STORE_DAILY_TOKENS,)
    due_in = present(world.ledger.row(shared.key).claim_at) - world.ledger.time()
    assert timedelta(seconds=1) <= due_in <= timedelta(seconds=20)
    await world.finish(shared.key)
    assert present(world.ledger.run(shared.key).failure).reason == "STORE_TOKENS_EXHAUSTED"
    assert {(each["user_id"], each["output_tokens"]) for each in shared.asked} == {("user", 7)}


@pytest.mark.parametrize("reason", ["PROVIDER_UNAVAILABLE", "MODEL_SERVER_UNKNOWN", "NETWORK"])
async def test_a_prompt_that_no_model_received_costs_no_tokens(reason: str) -> None:
    world = World(VERDICTS, [fails(reason), says("Done.")])
    key = world.ledger.submit("hello " * 3000, RunOptions(limits=Limits(provider_wait_seconds=900.0)))
    await world.finish(key)
    usage = world.ledger.run(key).usage
    assert (world.ledger.run(key).state, usage.estimated_tokens) == (RunState.COMPLETED, 0)


class Counting:
    """Stands in for job-store. Records the tokens that are counted, and answers once `answers` is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, bool]] = []
        self.answers = asyncio.Event()
        self.is_down = True

    async def TakeModelCall(self, request: TakeModelCallRequest) -> TakeModelCallResponse:
        self.asked.append((request.model_call_id, request.tokens, request.ended))
        await self.answers.wait()
        if self.is_down:
            raise Unavailable
        return TakeModelCallResponse()


async def test_the_tokens_of_completed_calls_are_reported_until_job_store_answers() -> None:
    """None are lost if job-store is unavailable, or if other calls end while it counts."""
    store_id, stub = StoreId(STORE), Counting()
    shared = SharedModels(cast("Any", stub), {"": PerMinute(tokens=1000)})
    counting = asyncio.create_task(shared.count_ended())
    shared.used("a", CountedCall(store_id, "", 500))
    await asyncio.sleep(0.1)
    shared.used("b", CountedCall(store_id, "", -100))
    stub.answers.set()
    with pytest.raises(Unavailable):
        await counting
    stub.is_down = False
    shared.used("c", CountedCall(store_id, "", 1))
    counting = asyncio.create_task(shared.count_ended())
    await asyncio.sleep(0.1)
    assert sorted(stub.asked[1:]) == [("a", 500, True), ("b", -100, True), ("c", 1, True)]
    counting.cancel()
