"""From a function's signature to the schema of its arguments, and from arguments to a call."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
import pydantic
from pydantic.fields import FieldInfo

from services.tool_registry.sdk.context import ToolContext
from services.tool_registry.sdk.docstring import read_docstring
from services.tool_registry.sdk.values import plain

_REFERENCES: Final = "#/$defs/{name}"


class ToolDefinitionError(TypeError):
    """A function cannot become a tool as it is written; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a function takes: the schema, and how arguments become parameters."""

    description: str
    arguments_schema: Mapping[str, Any]
    context_parameter: str
    """Name of the parameter that gets the ToolContext; empty if none does."""
    _struct: type[msgspec.Struct]
    _models: Mapping[str, pydantic.TypeAdapter[Any]]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters, with their types, for arguments that fit the schema.

        Raises:
            msgspec.ValidationError, pydantic.ValidationError: a type asks for more
                than its schema says.
        """
        struct = msgspec.convert(dict(arguments), self._struct)
        values = {name: getattr(struct, name) for name in self._struct.__struct_fields__}
        for name, model in self._models.items():
            if name in arguments:
                values[name] = model.validate_python(arguments[name])
        return values


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return what `function` takes.

    Types may be whatever msgspec or pydantic make a JSON Schema of: str, int,
    float, bool, date, Literal, Enum, Optional, list, dict, dataclass, TypedDict,
    msgspec.Struct, pydantic models. Descriptions come from the docstring or from
    a text in Annotated.

    Raises:
        ToolDefinitionError: a parameter has no type, or one without a schema.
    """
    name = getattr(function, "__name__", "tool")
    description, documented = read_docstring(function)
    hints = _hints(function, name)
    context_parameter = ""
    fields: list[Any] = []
    descriptions: dict[str, str] = {}
    models: dict[str, pydantic.TypeAdapter[Any]] = {}
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolDefinitionError(f"{name}: {parameter} cannot be described to a model; name each parameter")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"{name}: parameter {parameter.name} has no type")
        hint = hints[parameter.name]
        if hint is ToolContext:
            context_parameter = parameter.name
            continue
        text = documented.get(parameter.name) or _annotated_text(hint)
        if text:
            descriptions[parameter.name] = text
        if _mentions_pydantic(hint):
            models[parameter.name] = pydantic.TypeAdapter(hint)
            hint = Any
        fields.append(_field(parameter, hint))
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    struct = msgspec.defstruct(f"{name}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
    return Signature(
        description=description,
        arguments_schema=_schema(name, struct, models, descriptions, defaults),
        context_parameter=context_parameter,
        _struct=struct,
        _models=models,
    )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            f"{name}: {error}; types of a tool's parameters must be importable names of its module"
        ) from None


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.default is parameter.empty:
        return (parameter.name, hint)
    default = parameter.default
    if isinstance(default, list | dict | set):
        return (parameter.name, hint, msgspec.field(default_factory=default.copy))
    return (parameter.name, hint, default)


def _schema(
    name: str,
    struct: type[msgspec.Struct],
    models: Mapping[str, pydantic.TypeAdapter[Any]],
    descriptions: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    try:
        (_,), components = msgspec.json.schema_components((struct,), ref_template=_REFERENCES)
    except TypeError as error:
        raise ToolDefinitionError(f"{name}: {error}") from None
    schema: dict[str, Any] = components.pop(struct.__name__)
    schema.pop("title", None)
    definitions: dict[str, Any] = dict(components)
    for parameter, model in models.items():
        made = model.json_schema(ref_template="#/$defs/{model}")
        definitions |= made.pop("$defs", {})
        schema["properties"][parameter] = made | schema["properties"][parameter]
    for parameter, default in defaults.items():
        schema["properties"][parameter]["default"] = plain(default)
    for parameter, text in descriptions.items():
        schema["properties"][parameter] = {"description": text} | schema["properties"][parameter]
    return schema | ({"$defs": definitions} if definitions else {})


def _annotated_text(hint: Any) -> str:
    """Return the first text in an Annotated: what the parameter is for."""
    if get_origin(hint) is not Annotated:
        return ""
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, str)), "")


def _mentions_pydantic(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
        return True
    return any(_mentions_pydantic(part) or isinstance(part, FieldInfo) for part in get_args(hint))
