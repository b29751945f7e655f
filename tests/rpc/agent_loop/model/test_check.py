"""`pawl model check` finds the settings of a server by calling it as runs do."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from pawl.agent_loop.check import Report, check, main
from pawl.model_server.script import parse_script
from pawl.model_server.server import ModelServer
from tests.rpc.agent_loop.model.model_http import Exchange, model_http

CALL = {"index": 0, "id": "c", "function": {"name": "add_numbers", "arguments": '{"a":2,"b":3}'}}


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


async def picky(exchange: Exchange) -> None:
    """Act as a server that only knows `max_tokens`, rejects reasoning and returns reasoning as part of the text."""
    body = exchange.body
    if (
        "response_format" in body
        or "max_completion_tokens" in body
        or any("reasoning_content" in message for message in body["messages"])
    ):
        await exchange.respond(400, json.dumps({"detail": "unknown field"}))
        return
    await exchange.start_stream()
    if "max_tokens" in body:
        await exchange.events(chunk("length", content="1 2 3"), "[DONE]")
    elif body.get("tools") and body["messages"][-1]["role"] == "user":
        await exchange.events(chunk(reasoning="hm"), chunk("tool_calls", tool_calls=[CALL]), "[DONE]")
    else:
        await exchange.events(chunk("stop", content="<think>hm</think>Hello"), "[DONE]")
    await exchange.end()


async def found(url: str, model: str = "m") -> Report:
    return await check(url, "", model)


async def test_detects_the_settings_that_a_limited_server_needs() -> None:
    async with model_http(picky) as server:
        report = await found(server.url)
    assert report.works, report.lines
    settings = ("PAWL_OUTPUT_TOKENS_FIELD", "PAWL_REASONING_ECHO", "PAWL_MODEL_INPUT")
    assert [report.settings.get(name) for name in settings] == ["max_tokens", "none", None]
    said = (
        "<think>",
        "report token usage: Pawl estimates",
        "refuses response_format: The model server refused the request (HTTP 400): unknown",
        "its answer does not show that it sees them",
    )
    assert [each for each in said if each not in "\n".join(report.lines)] == []


async def test_first_listed_model_is_used() -> None:
    async with ModelServer(reasoning_echo=True) as server:
        report = await found(server.base_url, "")
    assert report.works, report.lines
    assert (report.settings["PAWL_MODEL"], report.settings["PAWL_REASONING_ECHO"]) == ("pawl-scripted", "auto")


async def test_detects_support_for_output_formats_and_images() -> None:
    red = {"when": {"user_contains": "Which colour"}, "reply": {"text": "Red."}}
    async with ModelServer(script=parse_script(json.dumps({"steps": [red]}).encode())) as server:
        report = await found(server.base_url)
        sent = server.requests[-1].body["messages"][0]["content"][1]["image_url"]["url"]
    assert report.settings["PAWL_MODEL_INPUT"] == "text,image"
    assert "ok    it follows response_format" in report.lines
    assert base64.b64decode(sent.partition(",")[2]).startswith(b"\x89PNG")
    plain = {"when": {"user_contains": "What is 2 + 3?"}, "reply": {"text": "5"}}
    blind = {
        "when": {"user_contains": "Which colour"},
        "reply": {"fault": {"type": "status", "status": 500, "body": {"error": {"message": "no images"}}}},
    }
    async with ModelServer(script=parse_script(json.dumps({"steps": [plain, blind]}).encode())) as server:
        report = await found(server.base_url)
    assert report.works, report.lines
    said = "\n".join(report.lines)
    assert "take an extra round" in said
    assert "it does not accept images: The model server failed (HTTP 500): no images." in said


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"fault": {"type": "status", "status": 401}}, "refused the credential"),
        ({"fault": {"type": "empty_stream"}}, "answer was empty"),
        ({"text": "I would rather not."}, "did not call the requested tool"),
    ],
)
async def test_reports_models_that_runs_cannot_use(reply: dict[str, Any], said: str) -> None:
    script = parse_script(json.dumps({"steps": [{"times": 100, "reply": reply}]}).encode())
    async with ModelServer(script=script) as server:
        report = await found(server.base_url)
    assert not report.works
    assert said in "\n".join(report.lines)


async def test_reports_an_unreachable_server() -> None:
    report = await found("http://127.0.0.1:9/v1", "")
    assert not report.works
    assert "cannot be reached" in report.lines[0]


def test_url_without_a_scheme_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["127.0.0.1:7622"])
    assert "the URL must start with http:// or https://" in capsys.readouterr().err
