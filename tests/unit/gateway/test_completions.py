"""The endpoint that completes calls and ends waits of workflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pawl.agent.v1.workflow_pb2 import SendEventRequest, SendEventResponse
from tests.unit.gateway.test_app import Browser, Channel


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
