"""Tool names that model servers allow: ^[a-zA-Z0-9_-]{1,64}$, without the dot in `<source>.<tool>`.

A dot becomes two underscores. If the result is too long or is another tool's name, it is truncated and a digest is
added.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from pawl.agent_loop.model.request import ModelRequest

_DOT: Final = "__"
_DIGEST_DIGITS: Final = 8
_CHARACTERS_MAX: Final = 64
_NOT_ALLOWED: Final = re.compile(r"[^a-zA-Z0-9_-]")


class Names:
    """A mapping between one request's tool names and the names that the model server receives. Deterministic."""

    def __init__(self, offered: Iterable[str]) -> None:
        names = sorted(set(offered))
        dotted = [name for name in names if "." in name]
        taken = set(names) - set(dotted)
        self._outward: dict[str, str] = {}
        for name in dotted:
            self._outward[name] = free = next(form for form in _forms(name) if form not in taken)
            taken.add(free)
        # Original names, keyed by the changed names that the model sees.
        self.inward: Mapping[str, str] = {form: name for name, form in self._outward.items()}

    def outward(self, name: str) -> str:
        """Return a tool's name for the model server. This also works for tools that are no longer offered."""
        return self._outward.get(name) or (next(_forms(name)) if "." in name else name)


def _forms(name: str) -> Iterator[str]:
    """Yield possible names for `name`, which contains a dot, in order of preference."""
    plain = _NOT_ALLOWED.sub("_", name.replace(".", _DOT))
    if len(plain) <= _CHARACTERS_MAX:
        yield plain
    salt = 0
    while True:
        digest = hashlib.sha256(f"{salt}:{name}".encode()).hexdigest()[:_DIGEST_DIGITS]
        yield f"{plain[: _CHARACTERS_MAX - _DIGEST_DIGITS - 1]}_{digest}"
        salt += 1


def names_of(request: ModelRequest) -> Names:
    return Names(str(_function(tool).get("name", "")) for tool in request.tools)


def renamed(request: ModelRequest, names: Names) -> ModelRequest:
    choice = request.tool_choice
    return msgspec.structs.replace(
        request,
        messages=tuple(_message(message, names) for message in request.messages),
        tools=tuple(_with_name(tool, names) for tool in request.tools),
        tool_choice=_with_name(choice, names) if isinstance(choice, Mapping) else choice,
    )


def _message(message: Mapping[str, Any], names: Names) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls or not any("." in _function(call).get("name", "") for call in calls):
        return message
    return {**message, "tool_calls": [_with_name(call, names) for call in calls]}


def _with_name(item: Mapping[str, Any], names: Names) -> Mapping[str, Any]:
    function = _function(item)
    if "." not in function.get("name", ""):
        return item
    return {**item, "function": {**function, "name": names.outward(function["name"])}}


def _function(item: Mapping[str, Any]) -> Mapping[str, Any]:
    function = item.get("function")
    return function if isinstance(function, Mapping) else {}
