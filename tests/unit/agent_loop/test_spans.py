"""The spans of runs, as an OTLP receiver gets them (OPS-2)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from pawl.agent_loop.loop.metrics import PrometheusMeter
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.agent_loop.loop.spans import tracing_of
from pawl.chassis.process.start import StartError
from pawl.server.process import tracing
from pawl.server.process.metrics import Metrics
from pawl.server.process.tracing import Tracer
from pawl.values import ENDED
from tests.fakes.loop_world import STORE, World
from tests.fakes.model import calls, fails, says
from tests.fakes.otlp_receiver import Received, Receiver, over_grpc, over_http
from tests.tables import for_each
from tests.unit.agent_loop.scenario import VERDICTS, everything
from tests.unit.agent_loop.test_jobs import Story, background
from tests.unit.agent_loop.workflows import test_running as workflows

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONTENTS = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


Trace = Callable[[World, Receiver], Metrics]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Makes a world's workers send spans to a receiver. Returns the metrics that count these spans."""
    tracers: list[Tracer] = []

    def trace(world: World, receiver: Receiver) -> Metrics:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        metrics = Metrics("agent_loop")
        tracers.append(Tracer("agent_loop", "i-1", metrics))
        tracing = tracing_of(tracers[-1], {"": "https://models.example:8443/v1", "eu": "http://eu.example"})
        world.dependencies = replace(world.dependencies, tracing=tracing)
        return metrics

    yield trace
    for tracer in tracers:
        tracer.shut_down()


@pytest.mark.parametrize("receiving", [over_http, over_grpc])
async def test_a_run_is_one_trace_across_its_pauses(
    receiving: Callable[[], AbstractContextManager[Receiver]], trace: Trace
) -> None:
    with receiving() as receiver:
        world = everything()
        trace(world, receiver)
        key = world.ledger.submit("secret", traceparent=CALLER)
        await world.finish(key)
        spans = receiver.wait(lambda spans: any(each.attributes.get("pawl.run.state") == "COMPLETED" for each in spans))

    drives = [span for span in spans if span.name == "invoke_agent default"]
    first = drives[0]
    assert {span.trace_id for span in spans} == {CALLER[3:35]}
    assert [drive.parent for drive in drives] == [CALLER[36:52], *[first.span_id] * (len(drives) - 1)]
    assert [drive.links for drive in drives[1:]] == [(before.context,) for before in drives[:-1]]
    assert [drive.attributes.get("pawl.resumed", False) for drive in drives] == [False, *[True] * (len(drives) - 1)]
    assert len(drives) > 2
    assert first.attributes["pawl.run.waits"]
    inner = [span for span in spans if span not in drives]
    assert {span.name for span in inner} == {
        "chat model",
        *(f"execute_tool {name}" for name in ("write", "look", "mail")),
    }
    assert {span.parent for span in inner} <= {drive.span_id for drive in drives}
    assert all(span.attributes["gen_ai.conversation.id"] == world.ledger.run(key).conversation_id for span in spans)
    assert "secret" not in repr(spans)
    used = world.ledger.run(key).usage
    for kind, spent in (("input", used.input_tokens), ("output", used.output_tokens)):
        name = f"gen_ai.usage.{kind}_tokens"
        assert sum(span.attributes[name] for span in drives) == spent
        assert sum(span.attributes[name] for span in spans if span.name == "chat model") == spent


async def test_contents_and_failures_are_recorded(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    with over_http() as receiver:
        monkeypatch.setenv(CONTENTS, "true")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "loops")
        world = World(VERDICTS, [calls('look {"n":2}'), calls('write {"n":1}'), fails("HTTP_500"), says("Ok")])
        trace(world, receiver)
        world.registry.forgets, world.registry.reads_at_once = {"write"}, True
        await world.finish(world.ledger.submit("hello", RunOptions(instructions="Be brief.")))
        write, look, drive = receiver.named("execute_tool write", "execute_tool look", "invoke_agent default")
        chats = [span for span in receiver.spans if span.name == "chat model"]

    assert drive.resource["service.name"] == "loops"
    assert (write.attributes["error.type"], write.is_error, look.is_error) == ("UNKNOWN", True, False)
    assert json.loads(write.attributes["gen_ai.tool.call.arguments"]) == {"n": 1}
    # The registry ran it together with the check, and got the context of its span.
    assert look.context in {each.traceparent[3:52] for each in world.registry.checked}
    assert [chat.attributes.get("error.type") for chat in chats] == [None, None, "HTTP_500", None]
    assert (chats[0].attributes["server.address"], chats[0].attributes["server.port"]) == ("models.example", 8443)
    roles = [message["role"] for message in json.loads(chats[-1].attributes["gen_ai.input.messages"])]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    (answer,) = json.loads(chats[-1].attributes["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": "Ok"}]


async def test_spans_and_metrics_name_the_model_server_of_the_store(trace: Trace) -> None:
    with over_http() as receiver:
        world = World(VERDICTS, [says("Ok")])
        metrics = trace(world, receiver)
        meter = PrometheusMeter(metrics, "models.example", world.clock.monotonic)
        world.dependencies = replace(world.dependencies, meter=meter)
        world.agents.limits = dataclasses.replace(world.agents.limits, model_server="eu")
        await world.finish(world.ledger.submit("hello"))
        (chat,) = receiver.named("chat model")

    assert (chat.attributes["server.address"], chat.attributes["server.port"]) == ("eu.example", 80)
    labels = {"store": STORE, "provider": "eu", "outcome": "answered"}
    assert metrics.registry.get_sample_value("pawl_agent_loop_model_calls_total", labels) == 1


async def test_without_a_tracer_the_callers_context_reaches_the_tools() -> None:
    world = everything()
    await world.finish(world.ledger.submit("hello", traceparent=CALLER))

    assert {each.traceparent for each in world.registry.asked} == {CALLER}
    assert {each.traceparent for each in world.registry.checked} == {CALLER}


@for_each(
    ("sampler", "caller", "recorded"),
    [("always_off", "", False), ("parentbased_always_on", CALLER[:-1] + "0", False), ("always_on", "", True)],
)
async def test_the_sampling_decision_reaches_the_tools(
    sampler: str, caller: str, recorded: bool, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept with the run, so that resumed drives follow it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    with over_http() as receiver:
        world = everything()
        trace(world, receiver)
        key = world.ledger.submit("hello", traceparent=caller)
        await world.drive()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        trace(world, receiver)
        await world.finish(key)
        if recorded:
            receiver.named("invoke_agent default")

        assert bool(receiver.spans) is recorded
    assert {each.traceparent[-2:] for each in world.registry.asked} == {"01" if recorded else "00"}
    assert len({each.traceparent[3:35] for each in world.registry.asked}) == 1


async def test_a_collector_that_hangs_costs_spans_but_nothing_else(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world = everything()
        metrics = trace(world, Receiver("http/protobuf", f"http://127.0.0.1:{silent.getsockname()[1]}"))
        await world.finish(world.ledger.submit("hello"))

        assert _counted(metrics, "dropped") > 0
        assert _counted(metrics, "exported") == 0


def test_failures_of_a_collector_that_is_down_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LAST_EXPORT_SECONDS", 60.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    metrics = Metrics("agent_loop")

    async def record() -> None:
        async with Tracer("agent_loop", "i-1", metrics) as tracer:
            tracer.end(tracer.start("span", {}), {})

    asyncio.run(record())

    assert _counted(metrics, "failed") == 1


@for_each(("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke"), ("OTEL_BSP_MAX_QUEUE_SIZE", "1")])
def test_unusable_settings_are_reported_at_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed, pytest.raises(StartError, match="tracing: an OTEL_"):
        changed.setenv(name, value)
        Tracer("agent_loop", "i-1", Metrics("agent_loop"))


def _counted(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("pawl_agent_loop_trace_spans_total", {"outcome": outcome}) or 0.0


async def test_sub_agents_continue_the_trace_while_map_chunks_link_to_it(trace: Trace) -> None:
    with over_http() as receiver:
        world = workflows.world_of(says("Fine."))
        trace(world, receiver)
        nodes = {
            "ask": {"kind": "agent", "task": "Look."},
            "each": {"kind": "map", "items": "${input.items}", "do": {"kind": "tool", "tool": "look"}},
        }
        key = workflows.start(world, nodes, {"items": list(range(300))})
        while world.ledger.run(key).state not in ENDED:
            await world.drive()
        spans = receiver.wait(lambda spans: any(_is_end(span, key.run_id) for span in spans))

    flow = next(span for span in spans if span.attributes["pawl.run.id"] == key.run_id)
    (agent,) = (span for span in spans if span.name == "invoke_agent default")
    assert (flow.name, agent.context[:32], agent.parent) == ("invoke_workflow flow", flow.trace_id, flow.span_id)
    drives = {span.context for span in spans if span.trace_id == flow.trace_id and span.name == flow.name}
    chunks = [span for span in spans if span.trace_id != flow.trace_id and not span.parent]
    assert len(chunks) > 1
    assert {chunk.links[0] for chunk in chunks} <= drives


async def test_turns_and_iterations_of_series_have_their_own_traces_with_links(trace: Trace) -> None:
    with over_http() as receiver:
        story = Story(calls(background("look", _interval=60, _stopAfter=2)), says("Begun."), says("Seen."))
        trace(story.world, receiver)
        story.say("watch it")
        await story.until(lambda: story.is_over and bool(story.turns))
        turn_id = story.turns[-1].run_id
        spans = receiver.wait(lambda spans: any(_is_end(span, turn_id) for span in spans))

    begun, *turns = (span for span in spans if span.name == "invoke_agent default" and not span.parent)
    looks = [span for span in spans if span.name == "execute_tool look"]
    assert len({span.trace_id for span in (begun, *turns, *looks)}) == 1 + len(turns) + 2
    assert {(span.parent, span.links) for span in (*turns, *looks)} == {("", (begun.context,))}


def _is_end(span: Received, run_id: str) -> bool:
    return span.attributes["pawl.run.id"] == run_id and span.attributes.get("pawl.run.state") == "COMPLETED"
