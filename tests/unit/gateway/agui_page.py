"""A page that accepts and rejects AG-UI events as @ag-ui/client does, and collects the messages."""

from __future__ import annotations

from typing import Any


class Page:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.expect_run()

    def expect_run(self) -> None:
        self.open: set[tuple[str, str]] = set()
        self.agents: set[str] = set()
        self.started = self.ended = False

    def of(self, role: str) -> list[dict[str, Any]]:
        return [each for each in self.messages if each["role"] == role]

    def texts(self) -> list[str]:
        """The answers that the page shows, in order."""
        return [each["content"] for each in self.of("assistant") if each["content"]]

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        assert not self.ended, f"{kind} after the end"
        assert self.started or kind in {"RUN_STARTED", "RUN_ERROR"}, kind
        name = str(event.get("messageId") or event.get("toolCallId") or event.get("stepName") or "")
        if kind == "RUN_STARTED":
            self.started = True
        elif kind in {"RUN_FINISHED", "RUN_ERROR"}:
            assert not self.open
            self.ended = True
        elif kind == "MESSAGES_SNAPSHOT":
            self._replace(event["messages"])
        elif kind == "TOOL_CALL_RESULT":
            message = {"id": name, "role": "tool", "toolCallId": event["toolCallId"], "content": event["content"]}
            assert name not in {each["id"] for each in self.messages}
            self.messages.append(message)
        elif kind == "SUBAGENT_STARTED":
            assert event["subagentRunId"] not in self.agents, "an agent started twice"
            self.agents.add(event["subagentRunId"])
            self.open.add(("SUBAGENT", event["subagentRunId"]))
        elif kind == "SUBAGENT_FINISHED":
            self.open.remove(("SUBAGENT", event["subagentRunId"]))
        elif kind.endswith(("_START", "_STARTED")):
            self._start(kind, name, event)
        elif kind.endswith(("_END", "_FINISHED")):
            self.open.remove((_base(kind), name))
        elif kind in {"TEXT_MESSAGE_CONTENT", "REASONING_MESSAGE_CONTENT"}:
            assert (_base(kind), name) in self.open
            assert event["delta"]
            self._message(name)["content"] += event["delta"]
        elif kind == "TOOL_CALL_ARGS":
            assert (_base(kind), name) in self.open
            self._call(name)["function"]["arguments"] += event["delta"]

    def _replace(self, messages: list[dict[str, Any]]) -> None:
        """Apply a snapshot. Reasoning and activities stay if the snapshot contains none."""
        ids = [each["id"] for each in messages]
        assert len(set(ids)) == len(ids), "two messages have the same id"
        left = {"reasoning", "activity"} - {each["role"] for each in messages}
        kept = [each for each in self.messages if each["role"] in left]
        self.messages = [*kept, *(dict(each) for each in messages)]

    def _start(self, kind: str, name: str, event: dict[str, Any]) -> None:
        assert (_base(kind), name) not in self.open, f"{name} is open"
        self.open.add((_base(kind), name))
        if kind in {"TEXT_MESSAGE_START", "REASONING_MESSAGE_START"}:
            assert name not in {each["id"] for each in self.messages}, f"{name} began twice"
            self.messages.append({"id": name, "role": event["role"], "content": ""})
        elif kind == "TOOL_CALL_START":
            parent = event["parentMessageId"]
            if parent not in {each["id"] for each in self.messages}:
                self.messages.append({"id": parent, "role": "assistant", "content": ""})
            call = {"id": name, "type": "function", "function": {"name": event["toolCallName"], "arguments": ""}}
            self._message(parent).setdefault("toolCalls", []).append(call)

    def _message(self, name: str) -> dict[str, Any]:
        return next(each for each in self.messages if each["id"] == name)

    def _call(self, name: str) -> dict[str, Any]:
        return next(call for each in self.messages for call in each.get("toolCalls", ()) if call["id"] == name)


def _base(kind: str) -> str:
    return kind.rpartition("_")[0]
