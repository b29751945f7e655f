"""The history check of a strict model server, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from pawl.model_server.request import read_request
from pawl.model_server.strict import check_request


def check_history(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise if a provider would reject these messages.

    Stricter than OpenAI: adjacent messages of one role, and a history that ends with the model's message, are rejected
    too, as some providers do.
    """
    body: dict[str, Any] = {"model": "m", "messages": messages, "stream": True}
    if tools:
        body["tools"] = tools
    check_request(read_request(msgspec.json.encode(body)), reasoning_echo=False)
    roles = [message["role"] for message in messages]
    twice = [(first, second) for first, second in pairwise(roles) if first == second and first in {"user", "assistant"}]
    assert twice == [], roles
    assert roles[-1] in {"user", "tool"}, roles
    for message in messages:
        for call in message.get("tool_calls", ()):
            assert isinstance(msgspec.json.decode(call["function"]["arguments"]), dict)
