"""Converts an MCP tool's result to JSON for the model."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final, assert_never

import mcp.types

from pawl.chassis.strict_json import INTEGER_MAX, INTEGER_MIN, JsonValue, storable

_BINARY_NOTE: Final = "The bytes are left out, because models read text only."


def result_json(result: mcp.types.CallToolResult) -> JsonValue:
    """Return a tool's result. If it consists of a single text item, return its text unchanged.

    If the text repeats structured content, return only the structured content. Binary content is described by its type
    and size, without its bytes.
    """
    content = [_block(block) for block in result.content]
    structured = _clean(result.structured_content)
    if structured is None:
        return content[0]["text"] if len(content) == 1 and content[0]["type"] == "text" else {"content": [*content]}
    if _repeats(result, structured):
        return structured
    return {"content": [*content], "structured": structured}


def error_text(result: mcp.types.CallToolResult) -> str:
    texts = [storable(block.text) for block in result.content if isinstance(block, mcp.types.TextContent)]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(_clean(result.structured_content), ensure_ascii=False)]
    return "\n".join(texts) or "the tool failed without an error message"


def _block(block: mcp.types.ContentBlock) -> dict[str, JsonValue]:
    match block:
        case mcp.types.TextContent():
            return {"type": "text", "text": storable(block.text)}
        case mcp.types.ImageContent() | mcp.types.AudioContent():
            return {"type": block.type} | _binary(block.data, block.mime_type)
        case mcp.types.ResourceLink():
            fields = block.model_dump(by_alias=True, mode="json", exclude_none=True)
            kept = ("uri", "name", "title", "description", "mimeType", "size")
            return {"type": "resource_link"} | {key: _clean(fields[key]) for key in kept if key in fields}
        case mcp.types.EmbeddedResource(resource=resource):
            found: dict[str, JsonValue] = {"type": "resource", "uri": storable(str(resource.uri))}
            if isinstance(resource, mcp.types.BlobResourceContents):
                return found | _binary(resource.blob, resource.mime_type or "")
            return found | {"mimeType": storable(resource.mime_type or ""), "text": storable(resource.text)}
        case _:
            assert_never(block)


def _binary(data: str, mime_type: str) -> dict[str, JsonValue]:
    described: dict[str, JsonValue] = {"mimeType": storable(mime_type)}
    try:
        size = len(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return described | {"note": "left out: it is not valid base64"}
    return described | {"bytes": size, "note": _BINARY_NOTE}


def _repeats(result: mcp.types.CallToolResult, structured: JsonValue) -> bool:
    """Return whether the text repeats the structured content, as the specification recommends.

    Many servers wrap a plain value in an object and also send the plain value as text.
    """
    if not result.content:
        return True
    if len(result.content) > 1 or not isinstance(result.content[0], mcp.types.TextContent):
        return False
    text = storable(result.content[0].text)
    values: list[JsonValue] = [structured]
    if isinstance(structured, dict) and len(structured) == 1:
        values += structured.values()
    try:
        return text in values or _clean(json.loads(text)) in values
    except (ValueError, RecursionError):
        return False


def _clean(value: Any) -> JsonValue:
    """Return JSON that the database accepts: without NUL, lone surrogates or integers beyond 64 bits."""
    match value:
        case str():
            return storable(value)
        case bool():
            return value
        case int():
            return value if INTEGER_MIN <= value <= INTEGER_MAX else str(value)
        case list():
            return [_clean(item) for item in value]
        case dict():
            return {storable(str(key)): _clean(item) for key, item in value.items()}
        case _:
            plain: JsonValue = value
            return plain
