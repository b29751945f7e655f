"""OpenAPI documents in JSON or YAML, in which all references are local."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import yaml

from pawl.tools.rules.pointers import find

DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
# Maximum size of a stored document, in its original form or reduced to the needed operations.
KEPT_BYTES_MAX: Final = 1024 * 1024
DOCUMENT_DEPTH_MAX: Final = 96
_REFERENCES_MAX: Final = 16
_NOTHING: Final = object()


class UnusableDocument(Exception):
    """Raised when the document, or a part of it, cannot be used. The message explains why."""


class Document:
    """An OpenAPI 3.0 or 3.1 document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        version = str(root.get("openapi", ""))
        if not version.startswith(("3.0", "3.1")):
            raise UnusableDocument('it must have "openapi": "3.0.x" or "3.1.x"')
        # True for 3.0, whose schemas are not yet JSON Schema.
        self.is_old = version.startswith("3.0")

    def follow(self, value: Any) -> Mapping[str, Any]:
        """Return an object after following references.

        Raises:
            UnusableDocument: A reference is missing, external or circular, or leads to a value that is not an object.
        """
        for _ in range(_REFERENCES_MAX):
            if not isinstance(value, Mapping):
                raise UnusableDocument("a part is not an object")
            target = value.get("$ref")
            if not isinstance(target, str):
                return value
            value = self.find(target)
        raise UnusableDocument("a reference is circular")

    def find(self, pointer: str) -> Any:
        """Return the target of a JSON pointer (`#/components/schemas/Pet`).

        Raises:
            UnusableDocument: The target is missing or in another document.
        """
        if not pointer.startswith("#/"):
            raise UnusableDocument(f"references to other documents are not supported: {pointer[:100]!r}")
        found = find(self.root, pointer, default=_NOTHING)
        if found is _NOTHING:
            raise UnusableDocument(f"{pointer[:100]!r} does not exist")
        return found


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader restricted to JSON types: no dates and, as in YAML 1.2, no booleans except true and false."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in {"int", "float", "null"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def read_document(data: bytes) -> Document:
    """Parse a document.

    Raises:
        UnusableDocument: The data is not a JSON or YAML object, is too large or too deep, or has an unsupported
            version.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise UnusableDocument(f"it is {len(data)} bytes, over the limit of {DOCUMENT_BYTES_MAX}")
    root = _read_json(data) if data.lstrip()[:1] == b"{" else _read_yaml(data)
    if not isinstance(root, dict):
        raise UnusableDocument("it is not an object")
    _check_depth(root)
    return Document(root)


def _read_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableDocument(f"it is not JSON: {str(error)[:200]}") from None


def _read_yaml(data: bytes) -> Any:
    """Parse YAML. Refuse aliases, because a short text with aliases can expand without limit."""
    try:
        depth = 0
        for event in yaml.parse(data, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise UnusableDocument(f"YAML aliases (*{event.anchor}) are not supported")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DOCUMENT_DEPTH_MAX:
                raise UnusableDocument(f"it is nested more than {DOCUMENT_DEPTH_MAX} levels deep")
        return _text_keys(yaml.load(data, Loader=_Loader))  # noqa: S506  # a safe loader with fewer types
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UnusableDocument(f"it is neither JSON nor YAML: {str(error)[:200]}") from None


def _text_keys(value: Any) -> Any:
    """Return `value` with its keys as strings. In YAML, a key such as `200:` is a number."""
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def _check_depth(root: Any) -> None:
    to_visit = [(root, 0)]
    while to_visit:
        value, depth = to_visit.pop()
        if depth > DOCUMENT_DEPTH_MAX:
            raise UnusableDocument(f"it is nested more than {DOCUMENT_DEPTH_MAX} levels deep")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        to_visit.extend((child, depth + 1) for child in children)
