"""Extracts the tools from an OpenAPI document, or reduces the document to the parts that they need.

Runs in a helper process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any, Final

import msgspec

from pawl.tool.v1.source_pb2 import OpenApiConfig
from pawl.tool_registry.sources.http.openapi import chosen_operations, read_operations
from pawl.tool_registry.sources.http.rules.openapi_document import (
    KEPT_BYTES_MAX,
    Document,
    UnusableDocument,
    read_document,
)
from pawl.tool_registry.sources.rules import Discovery
from pawl.tools.rules.definition import encode_definition
from pawl.tools.rules.pointers import parts

# Limit on the total size of a source's definitions.
TOOLS_BYTES_MAX: Final = 2 * 1024 * 1024

_OF_OPERATION: Final = ("operationId", "summary", "description", "parameters", "requestBody", "servers")
_OF_PATH: Final = ("parameters", "servers")


def read_tools(data: bytes, source_name: str, config: OpenApiConfig) -> Discovery:
    """Parse an OpenAPI document and return its tools (see `read_operations`).

    Raises:
        UnusableDocument: The document is invalid, or the chosen operations do not exist or are too large.
    """
    found = read_operations(read_document(data), source_name, config)
    size = sum(len(encode_definition(tool.definition)) + len(tool.binding) for tool in found.tools)
    if size > TOOLS_BYTES_MAX:
        raise UnusableDocument(
            f"its tools are {size} bytes in total, over the limit of {TOOLS_BYTES_MAX}; choose fewer operations"
        )
    return found


def extract(data: bytes, operation_ids: Collection[str]) -> bytes:
    """Return a document with only the chosen operations and the parts to which they refer.

    If no operations are chosen, keep all of them.

    Raises:
        UnusableDocument: The document is invalid, a chosen operation does not exist, or the result is too large to
            store.
    """
    document = read_document(data)
    kept: dict[str, Any] = {"openapi": document.root["openapi"], "servers": document.root.get("servers", [])}
    paths: dict[str, Any] = {}
    for operation in chosen_operations(document, operation_ids):
        item = paths.setdefault(operation.path, {key: operation.item[key] for key in _OF_PATH if key in operation.item})
        item[operation.method.lower()] = {
            key: operation.content[key] for key in _OF_OPERATION if key in operation.content
        }
    kept["paths"] = paths
    _add_referred(document, kept)
    written = msgspec.json.encode(kept, order="sorted")
    if len(written) > KEPT_BYTES_MAX:
        raise UnusableDocument(
            f"its operations are {len(written)} bytes, over the limit of {KEPT_BYTES_MAX}; choose fewer operations"
        )
    return written


def _add_referred(document: Document, kept: dict[str, Any]) -> None:
    seen: set[str] = set()
    to_visit: list[Any] = [kept]
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, list):
            to_visit += value
        elif isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and target not in seen:
                seen.add(target)
                with contextlib.suppress(UnusableDocument):  # The same error is reported when the extract is read.
                    found = document.find(target)
                    _put(kept, target, found)
                    to_visit.append(found)
            to_visit += value.values()


def _put(kept: dict[str, Any], pointer: str, found: Any) -> None:
    with contextlib.suppress(UnusableDocument):
        Document(kept).find(pointer)
        return
    *above, last = parts(pointer)
    target = kept
    for part in above:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return
    target[last] = found
