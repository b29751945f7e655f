"""Reads definitions that people and models write, and reports all faults together."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import UNSET

from pawl.agent_loop.workflows import validation
from pawl.agent_loop.workflows.definition import BYTES_MAX, NODES_MAX, Node, WorkflowDefinition, walk
from pawl.agent_loop.workflows.expressions import DefinitionFault, near
from pawl.chassis import strict_json
from pawl.errors import InvalidJson, TooLarge

FAULTS_MAX: Final = 100
_ANY_TEXTS: Final = ("${true}", "X")
_AT: Final = re.compile(r" - at `\$(.*)`$")
_PATTERNS: Final = {
    "^[a-z]": "a node name: a lower-case letter, then lower-case letters, digits and _, at most 40 characters",
    "^[A-Za-z][": "a name: a letter, then letters, digits, _ and -, at most 64 characters",
    "^[A-Za-z0-9_.-]": "a tool's name: letters, digits, _, - and ., at most 64 characters",
    "^[A-Za-z0-9_.:-]": "an event's name: letters, digits, _, -, . and :, at most 128 characters",
    "^(100": "a percentage such as 10%",
}


class DefinitionError(ValueError):
    """A definition has faults, at most FAULTS_MAX of them.

    `rest` is the definition without its faulty parts, some of which are replaced by placeholders; None if too little
    remains or it has too many nodes.
    """

    def __init__(self, faults: list[DefinitionFault], rest: WorkflowDefinition | None = None) -> None:
        self.faults = tuple(dict.fromkeys(faults))[:FAULTS_MAX]
        self.rest = rest
        super().__init__("\n".join(map(str, self.faults)))


def parse(data: bytes) -> WorkflowDefinition:
    """Parse and validate a definition in JSON of at most BYTES_MAX bytes.

    Raises:
        DefinitionError: with all faults, each with its path.
    """
    try:
        document = strict_json.loads(data, bytes_max=BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise DefinitionError([DefinitionFault("", error.message)]) from None
    return read(document)


def read(document: Any) -> WorkflowDefinition:
    """Validate a definition that was parsed from JSON or YAML.

    Raises:
        DefinitionError: with all faults, each with its path.
    """
    faults: list[DefinitionFault] = []
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name != "$schema"}
    usable, rest = _usable(WorkflowDefinition, document, "", faults), None
    if usable is not UNSET:
        nodes = document["nodes"]
        definition = msgspec.convert(usable, WorkflowDefinition)
        faults += validation.faults(definition, names=frozenset(nodes))
        if not faults:
            return definition
        rest = definition if sum(1 for _ in walk(definition)) <= NODES_MAX else None
    raise DefinitionError(faults, rest)


def _usable(kind: Any, value: Any, path: str, faults: list[DefinitionFault]) -> Any:
    """Return the value without its faulty parts, to validate the rest; UNSET if nothing remains."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if isinstance(value, dict) and (structs := [each for each in _options(bare) if _is_struct(each)]):
        struct = _chosen(structs, value, path, faults)
        return UNSET if struct is None else _usable_struct(struct, value, path, faults)
    if isinstance(value, dict) and value and get_origin(bare) is dict and get_args(bare)[1] is not Any:
        return _usable_dict(get_args(bare), value, path, faults)
    if isinstance(value, list) and get_origin(bare) is tuple:
        items = [_usable(get_args(bare)[0], each, f"{path}[{index}]", faults) for index, each in enumerate(value)]
        if UNSET in items:
            return [each for each in items if each is not UNSET]
    return value if _fits(kind, value, path, faults) else UNSET


def _usable_struct(struct: Any, value: dict[Any, Any], path: str, faults: list[DefinitionFault]) -> Any:
    fields = {each.encode_name: each for each in msgspec.structs.fields(struct)}
    tag = struct.__struct_config__.tag_field
    unknown = [name for name in value if name not in fields and name != tag]
    faults += [DefinitionFault(_at(path, name), "unknown field", near(str(name), fields)) for name in unknown]
    usable = {tag: value[tag]} if tag and tag in value else {}
    for name, each in fields.items():
        found: Any = UNSET
        if name in value:
            found = _usable(each.type, value[name], _at(path, name), faults)
        elif each.required:
            faults.append(DefinitionFault(_at(path, name), "is required"))
        if found is UNSET and each.required:
            # Anything of the right form, so that the rest can be validated.
            found = next((text for text in _ANY_TEXTS if _fits(each.type, text, "", [])), UNSET)
            if found is UNSET:
                return UNSET
        if found is not UNSET:
            usable[name] = found
    return usable


def _usable_dict(types: tuple[Any, ...], value: dict[Any, Any], path: str, faults: list[DefinitionFault]) -> Any:
    key, item = types
    names = [name for name in value if _fits(key, name, _at(path, name), faults)]
    items = {name: _usable(item, value[name], _at(path, name), faults) for name in names}
    return {name: each for name, each in items.items() if each is not UNSET} or UNSET


def _chosen(structs: list[Any], value: dict[Any, Any], path: str, faults: list[DefinitionFault]) -> Any:
    """Return the struct of an object: the node kind that it names, or the only one possible."""
    if not issubclass(structs[0], Node):
        return structs[0]
    kinds = {each.__struct_config__.tag: each for each in structs}
    kind = value.get("kind")
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    message = f"unknown kind {kind!r:.60}" if "kind" in value else "is required"
    hint = near(str(kind), kinds)
    faults.append(DefinitionFault(_at(path, "kind"), message, hint))
    return None


def _fits(kind: Any, value: Any, path: str, faults: list[DefinitionFault]) -> bool:
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error)
        if (found := _AT.search(message)) is not None:
            path += found[1].replace("[...]", "") if found[1].startswith((".", "[")) else ""
            message = message[: found.start()]
        message = message.replace("`", "")
        hint = next((text for start, text in _PATTERNS.items() if f"regex '{start}" in message), "")
        if isinstance(value, bool) and "str" in message:
            hint = "quote it: YAML reads yes, no, on and off as true and false"
        message = message.partition(" matching regex")[0]
        faults.append(DefinitionFault(path, message if "got" in message else f"{message}, got {value!r:.60}", hint))
        return False
    return True


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _at(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
