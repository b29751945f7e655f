"""An OpenAPI document, read: JSON or YAML, with references inside of it and to nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import yaml

from pawl.tool_registry.rules.pointers import find

DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
KEPT_BYTES_MAX: Final = 1024 * 1024
"""A document that is kept with its source: as it was given, or what is left when all else was taken out."""
DOCUMENT_DEPTH_MAX: Final = 96
_REFERENCES_MAX: Final = 16
_NOTHING: Final = object()


class UnusableDocument(Exception):
    """The document, or a part of it, that cannot be used; the text says why."""


class Document:
    """A document of OpenAPI 3.0 or 3.1."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        version = str(root.get("openapi", ""))
        if not version.startswith(("3.0", "3.1")):
            raise UnusableDocument('it must have "openapi": "3.0.x" or "3.1.x"')
        self.is_old = version.startswith("3.0")
        """True if its schemas are of 3.0, which are not yet JSON Schema."""

    def follow(self, value: Any) -> Mapping[str, Any]:
        """Return an object, or what it refers to.

        Raises:
            UnusableDocument: it refers to nothing, to elsewhere or in a circle.
        """
        for _ in range(_REFERENCES_MAX):
            if not isinstance(value, Mapping):
                raise UnusableDocument("a part is not an object")
            target = value.get("$ref")
            if not isinstance(target, str):
                return value
            value = self.find(target)
        raise UnusableDocument("a reference leads in a circle")

    def find(self, pointer: str) -> Any:
        """Return what a JSON pointer (`#/components/schemas/Pet`) points to.

        Raises:
            UnusableDocument: nothing, or it is in another document.
        """
        if not pointer.startswith("#/"):
            raise UnusableDocument(f"references to other documents are not followed: {pointer[:100]!r}")
        found = find(self.root, pointer, default=_NOTHING)
        if found is _NOTHING:
            raise UnusableDocument(f"there is nothing at {pointer[:100]!r}")
        return found


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """YAML as JSON sees it: no dates, and only true and false are booleans, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in {"int", "float", "null"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def read_document(data: bytes) -> Document:
    """Return a document.

    Raises:
        UnusableDocument: it is no JSON or YAML, too large, too deep or of another version.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise UnusableDocument(f"it has {len(data)} bytes, the limit is {DOCUMENT_BYTES_MAX}")
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
    """Return what YAML says. Aliases are refused: with them a short text can stand for an endless one."""
    try:
        depth = 0
        for event in yaml.parse(data, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise UnusableDocument(f"aliases of YAML (*{event.anchor}) are not read")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DOCUMENT_DEPTH_MAX:
                raise UnusableDocument(f"it is deeper than {DOCUMENT_DEPTH_MAX} levels")
        return _text_keys(yaml.load(data, Loader=_Loader))  # noqa: S506  # a safe loader with fewer types
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UnusableDocument(f"it is neither JSON nor YAML: {str(error)[:200]}") from None


def _text_keys(value: Any) -> Any:
    """Return `value` with texts for keys: `200:` is a number in YAML."""
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def _check_depth(root: Any) -> None:
    to_visit = [(root, 0)]
    while to_visit:
        value, depth = to_visit.pop()
        if depth > DOCUMENT_DEPTH_MAX:
            raise UnusableDocument(f"it is deeper than {DOCUMENT_DEPTH_MAX} levels")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        to_visit.extend((child, depth + 1) for child in children)
