"""From a function's signature to the schema of its arguments, and from arguments to a call.

Types are read by msgspec or pydantic. pydantic alone would refuse `msgspec.Struct`, and `typing.TypedDict` before
Python 3.12, and would pass over the limits of a `msgspec.Meta`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pydantic
from pydantic.fields import FieldInfo

from pawl.chassis.strict_json import JsonValue
from pawl.errors import PawlError
from pawl.tool_registry.rules.schema import compile_schema
from pawl.tool_registry.sdk.docstring import read_docstring
from pawl.tool_registry.sdk.hints import ToolDefinitionError, is_context, is_of_pydantic, read_hints, shown, text_of
from pawl.tool_registry.sdk.values import plain

_REFERENCES: Final = "#/$defs/{name}"
_USABLE: Final = (
    "str, int, float, bool, list, dict, Literal, Enum, Optional, date, datetime, a dataclass, a TypedDict or a"
    " pydantic model"
)

Models = dict[str, "pydantic.TypeAdapter[Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function: the schema, and how arguments become them."""

    description: str
    arguments_schema: Mapping[str, Any]
    context_parameter: str
    """Name of the parameter that gets the ToolContext; empty if none does."""
    _struct: type[msgspec.Struct]
    _models: Models
    _defaults: Mapping[str, Any]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters, with their types, for arguments that fit the schema.

        Defaults are copies: no call sees what another one did to them.

        Raises:
            msgspec.ValidationError, pydantic.ValidationError: a type asks for more
                than its schema says.
        """
        struct = msgspec.convert(dict(arguments), self._struct, str_keys=True)
        values = {name: getattr(struct, name) for name in self._struct.__struct_fields__}
        for name, value in values.items():
            if value is msgspec.UNSET:
                values[name] = copy.deepcopy(self._defaults[name])
            elif name in self._models:
                values[name] = self._models[name].validate_python(value)
        return values


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return what `function` takes.

    Types may be whatever msgspec or pydantic make a JSON Schema of: str, int,
    float, bool, date, Literal, Enum, Optional, list, dict, dataclass, TypedDict,
    msgspec.Struct, pydantic models. Descriptions come from the docstring or from
    a text in Annotated.

    Raises:
        ToolDefinitionError: a parameter has no type, one without a schema, or a
            default that does not fit it.
    """
    name = getattr(function, "__name__", "tool")
    description, documented = read_docstring(function)
    context_parameter = ""
    fields: list[Any] = []
    descriptions: dict[str, str] = {}
    models: Models = {}
    defaults: dict[str, Any] = {}
    for parameter, hint in read_hints(function, name):
        if is_context(hint):
            if context_parameter:
                raise ToolDefinitionError(f"{name}: both {context_parameter} and {parameter.name} are a ToolContext")
            context_parameter = parameter.name
            continue
        text = documented.get(parameter.name) or text_of(hint)
        if text:
            descriptions[parameter.name] = text
        model = _model(hint, f"{name}: parameter {parameter.name}")
        if model is not None:
            models[parameter.name] = model
        kept = hint if model is None else Any
        if parameter.default is inspect.Parameter.empty:
            fields.append((parameter.name, kept))
        else:
            fields.append((parameter.name, kept | msgspec.UnsetType, msgspec.UNSET))
            defaults[parameter.name] = parameter.default
    struct = msgspec.defstruct(f"{name}_arguments", fields, forbid_unknown_fields=True, kw_only=True)
    schema = _schema(name, struct, models)
    for parameter_name, default in defaults.items():
        _add_default(schema, parameter_name, default, models.get(parameter_name), name)
    for parameter_name, text in descriptions.items():
        schema["properties"][parameter_name] = {"description": text} | schema["properties"][parameter_name]
    return Signature(
        description=description,
        arguments_schema=schema,
        context_parameter=context_parameter,
        _struct=struct,
        _models=models,
        _defaults=defaults,
    )


def _model(hint: Any, place: str) -> pydantic.TypeAdapter[Any] | None:
    """Return what reads a parameter if that is not msgspec.

    Raises:
        ToolDefinitionError: neither can.
    """
    if not is_of_pydantic(hint):
        try:
            msgspec.json.schema_components((hint,), ref_template=_REFERENCES)
        except TypeError:
            pass
        else:
            return None
    try:
        model = pydantic.TypeAdapter(hint)
        model.json_schema()
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
        # Of what pydantic says only this tells the author of a tool what to do.
        said = str(error).partition("\n")[0].rstrip(".")
        instead = said.replace("Please use", "write") if said.startswith("Please use") else f"write {_USABLE}"
        raise ToolDefinitionError(f"{place}: {shown(hint)} has no JSON Schema; {instead}") from None
    return model


def _schema(name: str, struct: type[msgspec.Struct], models: Models) -> dict[str, Any]:
    try:
        (_,), components = msgspec.json.schema_components((struct,), ref_template=_REFERENCES)
    except TypeError as error:
        raise ToolDefinitionError(f"{name}: {error}") from None
    schema: dict[str, Any] = components.pop(struct.__name__)
    schema.pop("title", None)
    definitions: dict[str, Any] = dict(components)
    for definition in definitions.values():
        if "properties" in definition:
            # Fields that there are not would be dropped without a word.
            definition.setdefault("additionalProperties", False)
    for parameter, model in models.items():
        made = model.json_schema(ref_template="#/$defs/{model}")
        own = made.pop("$defs", {})
        if any(definitions.get(key, value) != value for key, value in own.items()):
            # Another class of that name is there already.
            made = model.json_schema(ref_template=f"#/$defs/{parameter}_{{model}}")
            own = {f"{parameter}_{key}": value for key, value in made.pop("$defs", {}).items()}
        definitions |= own
        schema["properties"][parameter] = made | schema["properties"][parameter]
    return schema | ({"$defs": definitions} if definitions else {})


def _add_default(
    schema: dict[str, Any], parameter: str, default: Any, model: pydantic.TypeAdapter[Any] | None, name: str
) -> None:
    """Write a default into the schema.

    Raises:
        ToolDefinitionError: it is not JSON, or does not fit its own type.
    """
    place = f"{name}: parameter {parameter}"
    if isinstance(default, FieldInfo):
        raise ToolDefinitionError(f"{place}: write its Field within Annotated, as in Annotated[int, Field(ge=1)] = 1")
    try:
        value = _json_of(default, model)
    except (TypeError, ValueError):
        raise ToolDefinitionError(
            f"{place}: its default {default!r} is not JSON; write None, and replace it in the function"
        ) from None
    part = schema["properties"][parameter]
    alone = {"type": "object", "properties": {parameter: part}, "$defs": schema.get("$defs", {})}
    try:
        fits = compile_schema(alone, recursion=True).is_valid({parameter: value})
    except PawlError as error:
        raise ToolDefinitionError(f"{place}: {error.message}") from None
    if not fits:
        instead = "; write | None behind the type" if value is None else ""
        raise ToolDefinitionError(f"{place}: its default {default!r} does not fit its type{instead}")
    part["default"] = value


def _json_of(default: Any, model: pydantic.TypeAdapter[Any] | None) -> JsonValue:
    if model is None:
        return plain(default)
    return plain(model.dump_python(default, mode="json", by_alias=True, warnings=False))
