"""The endpoint that completes calls and ends waits of workflows, and the trace context of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pawl.agent.v1.workflow_pb2 import SendEventRequest, SendEventResponse
from pawl.chassis.rpc.trace_context import current_traceparent
from tests.unit.gateway.test_app import BEARER, WHO, Browser, Channel


async def test_a_token_with_dots_ends_a_workflows_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"acme": "key"}', encoding="utf-8")
    sent = list[tuple[str, SendEventRequest]]()

    def unary_unary(_: Channel, name: str, **__: object) -> Any:
        async def call(request: Any, metadata: Any = (), **_: object) -> object:
            sent.append((dict(metadata)["authorization"], request))
            return SendEventResponse()

        return call if name.endswith("/SendEvent") else None

    monkeypatch.setattr(Channel, "unary_unary", unary_unary)
    browser = Browser(gateway_webhook_keys_file=keys)
    path = "/completions/acme/run_1.paid.ab"
    answer = await browser.ask("POST", path, json={"result": {"euros": 4}})
    assert answer.status_code == 200, answer.text
    assert sent == [("Bearer key", SendEventRequest(token="run_1.paid.ab", payload_json=b'{"euros":4}'))]
    assert (await browser.ask("POST", path, json={"error": "no"})).status_code == 400
    assert len(sent) == 1


async def test_the_callers_trace_context_is_passed_on_if_it_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = list[str]()

    def unary_unary(_: Channel, name: str, **__: object) -> Any:
        async def call(_request: Any, **_: object) -> object:
            passed.append(current_traceparent())
            return SendEventResponse()

        return call

    monkeypatch.setattr(Channel, "unary_unary", unary_unary)
    browser, ids = Browser(), f"{'a' * 32}-{'b' * 16}"
    rows = {
        f"00-{ids}-01": f"00-{ids}-01",
        f"cc-{ids}-01-new": f"00-{ids}-01",
        f"00-{ids}-01-new": "",
        f"ff-{ids}-01": "",
        f"00-{'0' * 32}-{'b' * 16}-01": "",
        f"00-{'a' * 32}-{'0' * 16}-01": "",
        "x" * 10_000: "",
    }
    for header in rows:
        await browser.ask("POST", WHO, json={}, headers=BEARER | {"traceparent": header})
    assert passed == list(rows.values())
