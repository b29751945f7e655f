"""How much a model thinks, and the form of its answer, at the door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import run_pb2
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.errors import failure

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


def options(**fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(text="Hello", options=run_pb2.RunOptions(**fields))


def form(schema_json: bytes, name: str = "") -> agent_pb2.StartRunRequest:
    return options(response_format=run_pb2.ResponseFormat(schema_json=schema_json, name=name))


async def test_an_effort_and_a_form_are_kept_with_the_run(stub: AgentServiceAsyncStub) -> None:
    asked = run_pb2.RunOptions(
        reasoning_effort=run_pb2.REASONING_EFFORT_HIGH,
        response_format=run_pb2.ResponseFormat(name="sum", schema_json=b'{"type":"object"}', strict=True),
    )
    kept = (await stub.StartRun(agent_pb2.StartRunRequest(text="Hello", options=asked), metadata=ME)).run.options
    assert (kept.reasoning_effort, kept.response_format) == (asked.reasoning_effort, asked.response_format)
    plain = (await stub.StartRun(agent_pb2.StartRunRequest(text="Hello"), metadata=ME)).run.options
    assert not plain.HasField("response_format")


@pytest.mark.parametrize(
    ("request_", "expected", "field"),
    [
        (options(reasoning_effort=99), "INVALID_FIELD", "options.reasoning_effort"),
        (form(b"{}", name="two words"), "INVALID_FIELD", "options.response_format.name"),
        (form(b""), "INVALID_FIELD", "options.response_format.schema_json"),
        (form(b" " * 70_000), "TOO_LARGE", "options.response_format.schema_json"),
        (form(b"{"), "INVALID_SCHEMA", None),
        (form(b'{"bad": 1}'), "INVALID_SCHEMA", None),
    ],
)
async def test_one_that_cannot_be_meant_is_refused_with_the_field_that_is_wrong(
    stub: AgentServiceAsyncStub, request_: agent_pb2.StartRunRequest, expected: str, field: str | None
) -> None:
    error = await failure(stub.StartRun(request_, metadata=ME))
    assert (error.reason, error.metadata.get("field")) == (expected, field)
