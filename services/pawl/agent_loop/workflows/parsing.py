"""Parses definitions that people and models write, and reports all faults together."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pawl.agent_loop.workflows import validation
from pawl.agent_loop.workflows.definition import BYTES_MAX, NODES_MAX, Node, WorkflowDefinition, walk
from pawl.agent_loop.workflows.expressions import DefinitionFault, near
from pawl.chassis import strict_json
from pawl.errors import InvalidJson, TooLarge
from pawl.tools.rules.schema import did_you_mean

FAULTS_MAX: Final = 100
_ANY_TEXTS: Final = ("${true}", "X")


class DefinitionError(ValueError):
    """Raised if a definition has faults. Lists at most FAULTS_MAX of them, sorted by path.

    `rest` is the definition without its faulty parts. Placeholders replace some of these parts. `rest` is None if too
    little remains, or if there are too many nodes.
    """

    def __init__(self, faults: list[DefinitionFault], rest: WorkflowDefinition | None = None) -> None:
        self.faults = tuple(sorted(dict.fromkeys(faults), key=lambda fault: fault.path))[:FAULTS_MAX]
        self.rest = rest
        super().__init__("\n".join(map(str, self.faults)))


def parse(data: bytes) -> WorkflowDefinition:
    """Parse and validate a definition in JSON of at most BYTES_MAX bytes.

    Raises:
        DefinitionError: The definition has faults. The error lists all of them with their paths.
    """
    try:
        document = strict_json.loads(data, bytes_max=BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise DefinitionError([DefinitionFault("", error.message)]) from None
    return read(document)


def read(document: Any) -> WorkflowDefinition:
    """Validate a definition that was parsed from JSON or YAML.

    Raises:
        DefinitionError: The definition has faults. The error lists all of them with their paths.
    """
    faults: list[DefinitionFault] = []
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name != "$schema"}
    try:
        definition = msgspec.convert(document, WorkflowDefinition)
    except msgspec.ValidationError:
        usable = _usable(WorkflowDefinition, document, "", faults)
        if usable is UNSET:
            raise DefinitionError(faults) from None
        definition = msgspec.convert(usable, WorkflowDefinition)
    faults += validation.faults(definition, names=frozenset(document["nodes"]))
    if not faults:
        return definition
    raise DefinitionError(faults, definition if sum(1 for _ in walk(definition)) <= NODES_MAX else None)


def _usable(kind: Any, value: Any, path: str, faults: list[DefinitionFault]) -> Any:
    """Return the value without its faulty parts, so that the rest can be validated, or UNSET if nothing remains."""
    bare = _bare(kind)
    if isinstance(value, dict) and (structs := [each for each in _options(bare) if _is_struct(each)]):
        struct = _chosen(structs, value, path, faults)
        return UNSET if struct is None else _usable_struct(struct, value, path, faults)
    if isinstance(value, dict) and value and get_origin(bare) is dict and get_args(bare)[1] is not Any:
        return _usable_dict(get_args(bare), value, path, faults)
    lists = [option for option in _options(bare) if get_origin(option) is tuple]
    if isinstance(value, list) and lists:
        items = [_usable(get_args(lists[0])[0], each, f"{path}[{index}]", faults) for index, each in enumerate(value)]
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
            # A placeholder of the right form, so that the rest can be validated.
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
    """Return the struct for an object. It depends on the node's kind, unless only one struct is possible."""
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
    except msgspec.ValidationError:
        wanted = _wanted(kind)
        choices = [each for option in _options(kind) if get_origin(option) is Literal for each in get_args(option)]
        hint = did_you_mean(value, choices).removeprefix("; ") if isinstance(value, str) else ""
        if isinstance(value, bool) and bool not in _options(kind):
            hint = "quote it: YAML reads yes, no, on and off as true and false"
        shown = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
        faults.append(DefinitionFault(path, f"must be {wanted}, got {shown:.60}", hint))
        return False
    return True


def _wanted(kind: Any) -> str:
    """Describe the values that a field's type allows."""
    options = [option for option in _options(kind) if option not in (NoneType, UnsetType)]
    if any(_bare(option) is float for option in options):
        options = [option for option in options if _bare(option) is not int]
    texts = list(dict.fromkeys(text for option in options for text in _wanted_option(option)))
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _wanted_option(option: Any) -> tuple[str, ...]:
    bare, limits = _bare(option), option.__metadata__[0] if get_origin(option) is Annotated else Meta()
    if get_origin(bare) is Literal:
        return get_args(bare)
    if _is_struct(bare):
        needed = [each.encode_name for each in msgspec.structs.fields(bare) if each.required]
        return ("a node" if issubclass(bare, Node) else f"an object with {' and '.join(needed)}",)
    kinds = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}
    text = limits.description or kinds.get(get_origin(bare) or bare, "a list")
    if limits.ge is not None:
        text += f" from {limits.ge} to {limits.le}"
    if limits.min_length and limits.max_length:
        text += f" of 1 to {limits.max_length} characters"
    elif limits.min_length:
        text += " with at least one entry"
    elif limits.max_length:
        text += f" of at most {limits.max_length} {'characters' if bare is str else 'entries'}"
    return (text,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _at(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
