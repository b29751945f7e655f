"""Requests that no service may take, by service and method: (name, request, reason, field)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.notify.v1 import notify_pb2
from pawl.tool.v1 import tool_pb2

Bad: TypeAlias = tuple[str, str, str, Message | bytes, str, str]
"""(service, method, what is wrong, the request, the reason, metadata `field`)."""

NAN: Final = float("nan")
INFINITY: Final = float("inf")
UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1

# What would be a subject, a wildcard, a path, SQL, another line or another alphabet.
BAD_IDS: Final = ("a.b", "*", ">", "a/b", "../a", "a b", "a'--", "é", "٣", "a\0b", "a\n", "x" * 65)
BAD_TEXTS: Final = {"NUL": "a\0b", "escape": "\x1b[2J", "delete": "\x7f", "C1": "\x85", "form feed": "\x0c"}
BAD_JSON: Final = {
    "no bytes": b"",
    "half": b'{"a":',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": 1e999}',
    "the same key twice": b'{"a": 1, "a": 2}',
    "NUL": b'{"a": "\\u0000"}',
    "a lone surrogate": b'{"a": "\\ud800"}',
    "a huge integer": b'{"a": 123456789012345678901234567890}',
    "too deep": b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "something after it": b"{} {}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "no UTF-8": b'{"a": "\xff"}',
}


def all_bad() -> Iterator[Bad]:
    """Give every bad request."""
    yield from _bytes()
    yield from _starts()
    yield from _commands()
    yield from _reads()
    yield from _tools()
    yield from _schemas()
    yield from _notifications()


def _bytes() -> Iterator[Bad]:
    for service, method in (("agent", "StartRun"), ("tool", "RegisterTool"), ("notify", "ListNotifications")):
        yield service, method, "no message", b"\xff\xff\xff", "MALFORMED_REQUEST", ""
        yield service, method, "endless groups", b"\x0b" * 100_000, "MALFORMED_REQUEST", ""
        yield service, "Nope", "no method", b"", "METHOD_NOT_FOUND", ""
    yield "agent", "StartRun", "a string that is no UTF-8", b"\x0a\x02\xff\xfe", "MALFORMED_REQUEST", ""
    yield "agent", "StartRun", "1.3 MiB", b"\xa2\x06\x80\x98\x53" + b"x" * (1331 * 1024), "TOO_LARGE", ""
    yield "execution", "CheckCalls", "a user at an internal method", b"", "PERMISSION_DENIED", ""
    yield "ledger", "ClaimRuns", "a user at an internal method", b"\xff", "PERMISSION_DENIED", ""


_OUT_OF_RANGE: Final = {
    FieldDescriptor.CPPTYPE_DOUBLE: (NAN, INFINITY, -INFINITY, -1.0, 0.0, 1e300),
    FieldDescriptor.CPPTYPE_UINT32: (0, UINT32_MAX),
    FieldDescriptor.CPPTYPE_UINT64: (UINT64_MAX,),
}


def _start(**fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(**{"text": "hello", **fields})


def _starts() -> Iterator[Bad]:
    for bad in BAD_IDS:
        yield "agent", "StartRun", f"conversation {bad!r}", _start(conversation_id=bad), "INVALID_ID", "conversation_id"
        yield "agent", "StartRun", f"request {bad!r}", _start(request_id=bad), "INVALID_ID", "request_id"
    for name, text in {**BAD_TEXTS, "nothing": ""}.items():
        yield "agent", "StartRun", f"text with {name}", _start(text=text), "INVALID_FIELD", "text"
    yield "agent", "StartRun", "a long text", _start(text="x" * (256 * 1024 + 1)), "TOO_LARGE", "text"
    yield "agent", "StartRun", "a long text of few characters", _start(text="é" * (128 * 1024 + 1)), "TOO_LARGE", "text"
    for number in (2, 99, -1):
        yield "agent", "StartRun", f"policy {number}", _start(policy=number), "INVALID_FIELD", "policy"
    message = agent_pb2.SendMessageRequest(conversation_id="absent", text="hello")
    yield "agent", "SendMessage", "absent conversation", message, "CONVERSATION_NOT_FOUND", ""
    yield "agent", "SendMessage", "no conversation", b"\x1a\x01x", "INVALID_ID", "conversation_id"
    for name, options, field in _options():
        reason = "TOO_LARGE" if "long instructions" in name else "INVALID_FIELD"
        yield "agent", "StartRun", name, _start(options=options), reason, f"options.{field}"
    for limit in run_pb2.RunLimits.DESCRIPTOR.fields:
        for value in _OUT_OF_RANGE[limit.cpp_type]:
            if limit.name == "agent_depth_max" and value == 0:
                continue  # no sub-agents at all
            limits = run_pb2.RunLimits(**{limit.name: value})  # type: ignore[arg-type]  # also what is too large
            request = _start(options=run_pb2.RunOptions(limits=limits))
            yield "agent", "StartRun", f"{limit.name} {value}", request, "INVALID_FIELD", f"options.limits.{limit.name}"


def _options() -> Iterator[tuple[str, run_pb2.RunOptions, str]]:
    for value in (NAN, INFINITY, -0.1, 2.1):
        yield f"temperature {value}", run_pb2.RunOptions(temperature=value), "temperature"
    choice = run_pb2.ToolChoice
    wrong: dict[str, list[dict[str, Any]]] = {
        "output_tokens_max": [{"output_tokens_max": 0}],
        "model": [{"model": "a\0"}, {"model": "a\nb"}, {"model": "x" * 257}],
        "tool_names": [{"tool_names": [""]}, {"tool_names": ["a\n"]}, {"tool_names": ["x"] * 1001}],
        "tool_choice.tool_name": [
            {"tool_choice": choice(mode=choice.MODE_TOOL)},
            {"tool_choice": choice(tool_name="x")},
        ],
        "tool_choice.mode": [
            {"tool_choice": choice(mode=99)},  # type: ignore[arg-type]
            {"tool_choice": choice(mode=choice.MODE_REQUIRED), "without_tools": True},
        ],
        "round_limit_policy": [{"round_limit_policy": 9}],
        "batch_order": [{"batch_order": -1}],
        "unknown_outcome_policy": [{"unknown_outcome_policy": 9}],
    }
    for field, variants in wrong.items():
        for number, fields in enumerate(variants):
            yield f"{field} {number}", run_pb2.RunOptions(**fields), field
    yield "instructions with NUL", run_pb2.RunOptions(instructions="a\0"), "instructions"
    yield "long instructions", run_pb2.RunOptions(instructions="x" * (64 * 1024 + 1)), "instructions"


def _decide(**fields: Any) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(**{"call_id": "absent", "kind": 1, "digest": "0" * 64, **fields})
    return agent_pb2.DecideRequest(run_id="absent", decision=decision)


def _commands() -> Iterator[Bad]:
    yield "agent", "Decide", "no decision", agent_pb2.DecideRequest(run_id="x"), "INVALID_ID", "decision.call_id"
    yield "agent", "Decide", "absent run", _decide(), "RUN_NOT_FOUND", ""
    yield "agent", "Decide", "an edit of an absent call", _decide(kind=2, arguments_json=b"{}"), "CALL_NOT_FOUND", ""
    for fields, reason, field in (
        ({"kind": 0}, "INVALID_FIELD", "decision.kind"),
        ({"kind": 99}, "INVALID_FIELD", "decision.kind"),
        ({"run_id": "another"}, "INVALID_FIELD", "decision.run_id"),
        ({"kind": 4, "answer": ""}, "INVALID_FIELD", "decision.answer"),
        ({"kind": 4, "answer": "\0"}, "INVALID_FIELD", "decision.answer"),
        ({"kind": 4, "answer": "x" * (64 * 1024 + 1)}, "TOO_LARGE", "decision.answer"),
        ({"kind": 1, "answer": "x"}, "INVALID_FIELD", "decision.answer"),
        ({"kind": 1, "arguments_json": b"{}"}, "INVALID_FIELD", "decision.arguments_json"),
        ({"kind": 3, "reason": "\x1b"}, "INVALID_FIELD", "decision.reason"),
        ({"kind": 3, "reason": "x" * 4097}, "TOO_LARGE", "decision.reason"),
        ({"digest": "0" * 129}, "TOO_LARGE", "decision.digest"),
        ({"kind": 2, "arguments_json": b"[]"}, "INVALID_JSON", ""),
    ):
        yield "agent", "Decide", str(fields)[:60], _decide(**fields), reason, field
    for name, content in BAD_JSON.items():
        yield "agent", "Decide", f"an edit with {name}", _decide(kind=2, arguments_json=content), "INVALID_JSON", ""
    absent = types_pb2.ToolResult(call_id="absent", content_json=b"1")
    results = agent_pb2.SubmitToolResultsRequest
    yield "agent", "SubmitToolResults", "no result", results(run_id="x"), "INVALID_FIELD", "results"
    yield "agent", "SubmitToolResults", "65", results(run_id="x", results=[absent] * 65), "INVALID_FIELD", "results"
    yield "agent", "SubmitToolResults", "absent run", results(run_id="x", results=[absent]), "RUN_NOT_FOUND", ""
    yield "agent", "CancelRun", "absent run", agent_pb2.CancelRunRequest(run_id="absent"), "RUN_NOT_FOUND", ""
    yield "agent", "CancelRun", "reason", agent_pb2.CancelRunRequest(run_id="x", reason="\0"), "INVALID_FIELD", "reason"
    resolve = agent_pb2.ResolveCallRequest
    for name, request, reason, field in (
        ("no finding", resolve(run_id="x", call_id="x"), "INVALID_FIELD", "resolution"),
        (
            "absent run",
            resolve(run_id="x", call_id="x", resolution=agent_pb2.RESOLUTION_RUN_AGAIN),
            "RUN_NOT_FOUND",
            "",
        ),
        ("no result", resolve(run_id="x", call_id="x", resolution=agent_pb2.RESOLUTION_HAPPENED), "INVALID_JSON", ""),
        (
            "a result",
            resolve(run_id="x", call_id="x", resolution=agent_pb2.RESOLUTION_RUN_AGAIN, content_json=b"1"),
            "INVALID_FIELD",
            "content_json",
        ),
    ):
        yield "agent", "ResolveCall", name, request, reason, field


def _reads() -> Iterator[Bad]:
    for bad in BAD_IDS:
        yield "agent", "GetRun", f"run {bad!r}", agent_pb2.GetRunRequest(run_id=bad), "INVALID_ID", "run_id"
    yield "agent", "GetRun", "absent run", agent_pb2.GetRunRequest(run_id="absent"), "RUN_NOT_FOUND", ""
    for value in (NAN, INFINITY, -1.0, 60.1, 1e308):
        request = agent_pb2.GetRunRequest(run_id="absent", wait_seconds=value)
        yield "agent", "GetRun", f"wait {value}", request, "INVALID_FIELD", "wait_seconds"
    absent = agent_pb2.ListMessagesRequest(conversation_id="absent")
    yield "agent", "ListMessages", "absent conversation", absent, "CONVERSATION_NOT_FOUND", ""
    yield "agent", "ListCalls", "absent run", agent_pb2.ListCallsRequest(run_id="absent"), "RUN_NOT_FOUND", ""
    for number in (0, 99):
        states = agent_pb2.ListRunsRequest(states=[number])  # type: ignore[list-item]
        yield "agent", "ListRuns", f"state {number}", states, "INVALID_FIELD", "states"
    pages: tuple[tuple[str, str, Any], ...] = (
        ("agent", "ListRuns", agent_pb2.ListRunsRequest),
        ("agent", "ListPending", agent_pb2.ListPendingRequest),
        ("tool", "ListTools", tool_pb2.ListToolsRequest),
        ("notify", "ListNotifications", notify_pb2.ListNotificationsRequest),
    )
    for service, method, make in pages:
        for size in (201, UINT32_MAX):
            yield service, method, f"{size} a page", make(page_size=size), "INVALID_FIELD", "page_size"
        for token in ("x", "AAAA", "é", "a\0b", "=" * 100, "x" * 100_000, "all-٣", "dG9vbHM6/w=="):
            yield service, method, f"token {token[:9]!r}", make(page_token=token), "INVALID_PAGE_TOKEN", ""


def _tools() -> Iterator[Bad]:
    for name in ("", "absent", "a\0b", "a.b", "é", "x" * 65, "x" * 100_000):
        yield "tool", "GetTool", repr(name[:9]), tool_pb2.GetToolRequest(name=name), "TOOL_NOT_FOUND", ""
        yield "tool", "UnregisterTool", repr(name[:9]), tool_pb2.UnregisterToolRequest(name=name), "TOOL_NOT_FOUND", ""
    for version in (99, UINT32_MAX):
        request = tool_pb2.GetToolRequest(name="calculate", version=version)
        yield "tool", "GetTool", f"version {version}", request, "TOOL_NOT_FOUND", ""
    built_in = tool_pb2.UnregisterToolRequest(name="calculate")
    yield "tool", "UnregisterTool", "a built-in tool", built_in, "TOOL_NOT_FOUND", ""
    yield "tool", "RegisterTool", "a built-in name", register(name="calculate"), "TOOL_EXISTS", ""
    wrong: dict[str, list[Any]] = {
        "name": ["", "a.b", "a\n", "x" * 65],
        "description": ["", "a\0b", "x" * 4097],
        "context": [0, 1, 3, 99],
        "category": [99],
        "effect_class": [99],
        "timeout_seconds": [NAN, INFINITY, -1.0, 0.01, 1e9],
        "resource_keys": [["{"], ["a\0"], ["{path.__class__}"], ["a"] * 17],
        "result_bytes_max": [UINT32_MAX],
        "allowed_user_ids": [["a b"], ["x"] * 1001],
        "offer_fallback": [99],
        "fallback_tool_name": ["calculate"],
    }
    for field, values in wrong.items():
        for value in values:
            yield (
                "tool",
                "RegisterTool",
                f"{field} {str(value)[:9]!r}",
                register(**{field: value}),
                "INVALID_FIELD",
                field,
            )
    absent = register(offer_fallback=call_pb2.OFFER_FALLBACK_BACKEND_TOOL, fallback_tool_name="absent")
    yield "tool", "RegisterTool", "an absent fallback", absent, "INVALID_FIELD", "fallback_tool_name"


def register(**fields: Any) -> tool_pb2.RegisterToolRequest:
    """Return a request that is right but for `fields`."""
    right: dict[str, Any] = {
        "name": "bad_input",
        "description": "Shows something.",
        "arguments_schema_json": b'{"type": "object"}',
        "context": call_pb2.EXECUTION_CONTEXT_FRONTEND,
    }
    return tool_pb2.RegisterToolRequest(definition=tool_pb2.ToolDefinition(**(right | fields)))


def _schemas() -> Iterator[Bad]:
    def of(**argument: Any) -> bytes:
        return json.dumps({"type": "object", "properties": {"a": argument}}).encode()

    doubling = {f"d{n}": {"$anchor": f"d{n}", "allOf": [{"$ref": f"#d{n + 1}"}] * 2} for n in range(40)}
    growing = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    wrong = BAD_JSON | {
        "an array": b"[]",
        "no type": b"{}",
        "another type": b'{"type": "array"}',
        "another dialect": b'{"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}',
        "an unknown type": of(type="nope"),
        "a pattern that is none": of(pattern="("),
        "a pattern that looks back": of(pattern=r"(a)\1"),
        "a pattern of terabytes": of(pattern="((a{1,1000}){1,1000}){1,1000}"),
        "a step of nothing": of(multipleOf=0),
        "a reference to nothing": of(**{"$ref": "#/$defs/none"}),
        "a remote reference": of(**{"$ref": "http://127.0.0.1:9/a.json"}),
        "a reference to a file": of(**{"$ref": "file:///etc/passwd"}),
        "itself": of(**{"$ref": "#"}),
        "itself, dynamically": b'{"type": "object", "$dynamicAnchor": "a", "not": {"$dynamicRef": "#a"}}',
        "itself, by its address": b'{"type": "object", "$id": "http://a/b", "not": {"$ref": "http://a/b"}}',
        "growth": json.dumps({"type": "object", "$ref": "#/$defs/d0", "$defs": growing | {"d40": {}}}).encode(),
        "growth by anchors": json.dumps({"type": "object", "$ref": "#d0", "$defs": doubling}).encode(),
        "70 KB": b'{"type": "object", "title": "' + b"x" * 70_000 + b'"}',
    }
    for name, schema in wrong.items():
        yield "tool", "RegisterTool", f"schema: {name}", register(arguments_schema_json=schema), "INVALID_SCHEMA", ""


def _notifications() -> Iterator[Bad]:
    acknowledge = notify_pb2.AcknowledgeNotificationsRequest
    for ids, reason, field in (
        ([], "INVALID_FIELD", "notification_ids"),
        (["x"] * 201, "INVALID_FIELD", "notification_ids"),
        (["a.b"], "INVALID_ID", "notification_ids"),
        (["absent"], "NOTIFICATION_NOT_FOUND", ""),
    ):
        yield "notify", "AcknowledgeNotifications", str(ids)[:9], acknowledge(notification_ids=ids), reason, field
