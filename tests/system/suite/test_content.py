"""Richer input and output through the whole suite: images, documents, answers in a form."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx2
import pytest

from pawl.client import AsyncClient, file, form, image, output
from pawl.errors import DocumentNotFound, InvalidSchema, TooLarge
from pawl.event.v1 import message_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.fakes.images import PNG
from tests.system.suite.test_python_client import arguments

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


async def test_the_model_sees_an_image_and_a_document_as_they_were_sent(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(PNG)
    async with AsyncClient(**arguments(suite)) as pawl:
        await pawl.put_document("plants.md", "Water them on Mondays.")
        run = await pawl.start("who are you, and what is this?", parts=[image(tmp_path / "dot.png"), file("plants.md")])
        await pawl.delete_document("plants.md")
        done = await pawl.result(run.run_id)
        assert done.state == run_pb2.RUN_STATE_COMPLETED
        (shown, _) = [message async for message in pawl.messages(run.conversation_id)]
        assert [part.WhichOneof("kind") for part in shown.parts] == ["text", "image", "file"]
        assert shown.role == message_pb2.ROLE_USER
        with pytest.raises(DocumentNotFound):
            await pawl.start("again", parts=[file("plants.md")])
    base_url = (suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as model:
        requests = (await model.get("/_pawl/requests")).json()["requests"]
    asked = next(
        each["body"]["messages"][-1]["content"]
        for each in reversed(requests)
        if "what is this?" in json.dumps(each["body"]["messages"][-1])
    )
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert {"type": "image_url", "image_url": {"url": url}} in asked
    assert "Water them on Mondays." in asked[2]["text"]


async def test_an_answer_in_a_form_is_a_value(suite: Suite) -> None:
    options = run_pb2.RunOptions(
        response_format=form(SCHEMA, strict=True), reasoning_effort=run_pb2.REASONING_EFFORT_LOW
    )
    async with AsyncClient(**arguments(suite)) as pawl:
        run = await pawl.start("what is 17 * 23?", options=options)
        done = await pawl.result(run.run_id)
        assert done.state == run_pb2.RUN_STATE_COMPLETED
        assert "391" in output(done)["answer"]
        assert json.loads(done.output_text) == output(done)
        with pytest.raises(InvalidSchema):
            await pawl.start("no", options=run_pb2.RunOptions(response_format=form({"type": "string"})))


async def test_the_largest_message_goes_through_and_its_image_stays_in_the_conversation(suite: Suite) -> None:
    async with AsyncClient(**arguments(suite)) as pawl:
        large = image(PNG + bytes(1024 * 1024 - len(PNG)))
        first = await pawl.start(parts=[large])
        assert (await pawl.result(first.run_id)).state == run_pb2.RUN_STATE_COMPLETED
        second = await pawl.start("what is 6 * 7?", conversation_id=first.conversation_id)
        done = await pawl.result(second.run_id)
        assert (done.state, "42" in done.output_text) == (run_pb2.RUN_STATE_COMPLETED, True)
        with pytest.raises(TooLarge):
            await pawl.start("one more", parts=[large])
