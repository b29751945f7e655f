"""Arguments of the client that cannot be meant so: refused in a sentence, by the class of the field's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pawl.client import AsyncClient, Client, answer, approve, edit, image, reject, result
from pawl.client.forms import parts_of
from pawl.errors import InvalidField
from pawl.event.v1 import message_pb2

NOBODY = "127.0.0.1:1"
ANY: Any = "call_1"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda pawl: pawl.decide(ANY), "decision"),
        (lambda pawl: pawl.decide_all([ANY]), "decision"),
        (lambda pawl: pawl.submit(ANY), "result"),
        (lambda pawl: pawl.fork("conv_1", -1), "number"),
        (lambda pawl: pawl.fork("conv_1", 2**64), "number"),
        (lambda pawl: pawl.top_up("run_1", -5), "tokens"),
        (lambda pawl: pawl.start(parts=[5]), "parts"),
        (lambda pawl: pawl.send("conv_1", parts=[None]), "parts"),
        (lambda pawl: pawl.start_job("clock", until={}), "until"),
        (lambda pawl: pawl.start_job("clock", until=""), "until"),
        (lambda pawl: pawl.start_job("clock", when=""), "when"),
        (lambda pawl: pawl.start_job("clock", when={}), "when"),
        (lambda pawl: pawl.start_job("clock", when={"pause": 60}), "when"),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_its_field(call: Callable[[Any], Any], field: str) -> None:
    async with AsyncClient(NOBODY, environment={}) as pawl:
        with pytest.raises(InvalidField) as refused:
            await call(pawl)
    assert refused.value.metadata == {"field": field}
    with Client(NOBODY, environment={}) as plain, pytest.raises(InvalidField):
        call(plain)


async def test_a_position_before_the_first_event_is_refused() -> None:
    async with AsyncClient(NOBODY, environment={}) as pawl:
        with pytest.raises(InvalidField, match="after_seq"):
            await anext(pawl.watch("run_1", -1))


@pytest.mark.parametrize("make", [approve, reject, lambda call: edit(call, {}), lambda call: answer(call, "Oslo")])
def test_a_decision_is_about_a_call_and_not_about_its_id(make: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidField, match="give the call itself"):
        make(ANY)
    with pytest.raises(InvalidField, match="give the call itself"):
        result(ANY, 1)


def test_a_text_among_parts_is_a_part() -> None:
    text, picture = message_pb2.Part(text="Look"), image(b"x")
    assert parts_of(["Look", picture]) == [text, picture]
    assert parts_of("Look") == [text]
