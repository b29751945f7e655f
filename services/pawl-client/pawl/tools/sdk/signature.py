"""Signatures and docstrings of tool functions: descriptions, parameter types and the arguments schema."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time
from types import NoneType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgspec
import pydantic
from pydantic.fields import FieldInfo

from pawl.chassis.strict_json import JsonValue
from pawl.errors import PawlError
from pawl.tools.rules.schema import compile_schema
from pawl.tools.sdk.context import ToolContext
from pawl.tools.sdk.values import plain

_SECTION: Final = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):")
_PARAMETER: Final = re.compile(r"(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_SPHINX: Final = re.compile(r":(param|return|returns|rtype|type|raises)(?:\s+[^:]*?(\w+))?:\s*(.*)")


def read_docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its parameters.

    Reads Google style (`Args:`) and Sphinx style (`:param name:`). The text before the first section is the
    description. The library docstring_parser is not used, because it drops all parameters if a single line in a section
    has no colon.
    """
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    section = ""
    target: list[str] | None = description
    indent = 0
    for line in (inspect.getdoc(function) or "").splitlines():
        heading = _SECTION.fullmatch(line.strip()) if line == line.lstrip() else None
        sphinx = _SPHINX.fullmatch(line.strip())
        if heading:
            section, target, indent = heading[1], None, 0
        elif sphinx:
            section = "sphinx"
            target = parameters.setdefault(sphinx[2], [sphinx[3]]) if sphinx[1] == "param" and sphinx[2] else None
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _PARAMETER.fullmatch(line)
            if entry and (not indent or len(entry[1]) <= indent):
                indent = len(entry[1])
                target = parameters.setdefault(entry[2], [entry[3]])
            elif target is not None:
                target.append(line.strip())
        elif target is not None and (not section or section == "sphinx"):
            target.append(line if target is description else line.strip())
    return "\n".join(description).strip(), {name: " ".join(filter(None, lines)) for name, lines in parameters.items()}


_OF_PYDANTIC: Final = ("pydantic", "annotated_types")


class ToolDefinitionError(TypeError):
    """Raised when a function cannot become a tool. The message explains why and what to write instead."""


def read_hints(function: Callable[..., Any], name: str) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yield a function's parameters with their types. The return type is ignored.

    Raises:
        ToolDefinitionError: The function is a method, or a parameter cannot be passed by name, has no type, or has a
            type that cannot be resolved.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolDefinitionError(
                f"{name}: {parameter} cannot be described to a model; write one parameter per argument that can"
                " be passed by name"
            )
        if parameter.annotation is parameter.empty:
            if parameter.name in ("self", "cls"):
                raise ToolDefinitionError(f"{name}: a method cannot be a tool; write a function outside the class")
            raise ToolDefinitionError(
                f"{name}: parameter {parameter.name} has no type: add one, for example {parameter.name}: str"
            )
        hint = _found(function, name, parameter)
        _refuse_undescribable(hint, f"{name}: parameter {parameter.name}")
        yield parameter, hint


def _found(function: Callable[..., Any], name: str, parameter: inspect.Parameter) -> Any:
    def carrier() -> None:
        """Carry only this annotation, so that a NameError can be attributed to the parameter."""

    carrier.__annotations__ = {parameter.name: parameter.annotation}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(carrier, globalns=names, include_extras=True)[parameter.name]
    except (NameError, AttributeError) as error:
        raise ToolDefinitionError(
            f"{name}: parameter {parameter.name}: {error}; its type must be a top-level name of the module, and "
            "must not be imported only for type checkers (if TYPE_CHECKING)"
        ) from None
    except (SyntaxError, TypeError) as error:
        raise ToolDefinitionError(f"{name}: parameter {parameter.name}: {parameter.annotation!r}: {error}") from None


def _refuse_undescribable(hint: Any, place: str) -> None:
    for part in _parts(hint):
        if isinstance(part, TypeVar):
            raise ToolDefinitionError(
                f"{place}: the type variable {part} cannot be described to a model: use a concrete type"
            )
        if part in (pydantic.SecretStr, pydantic.SecretBytes):
            raise ToolDefinitionError(
                f"{place}: the model cannot provide secrets: add a ToolContext parameter and call context.secret(name)"
            )


def is_context(hint: Any) -> bool:
    """Return whether a parameter with this type receives the ToolContext. Optional and Annotated types also count."""
    parts = [part for part in _parts(hint) if isinstance(part, type)]
    return ToolContext in parts and set(parts) <= {ToolContext, NoneType}


def text_of(hint: Any) -> str:
    """Return the first string or `Doc` in an Annotated type, also inside an Optional, or an empty string."""
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            text = extra if isinstance(extra, str) else getattr(extra, "documentation", None)
            if isinstance(text, str):
                return text
    if get_origin(hint) in (Annotated, typing.Union):
        return next(filter(None, map(text_of, get_args(hint))), "")
    return ""


def is_of_pydantic(hint: Any) -> bool:
    """Return whether a type needs pydantic. Examples are pydantic models and constraints, `datetime` and `time`."""
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
        return True
    if hint in (datetime, time):
        return True
    if get_origin(hint) is Annotated:
        extras = get_args(hint)[1:]
        if any(type(extra).__module__.partition(".")[0] in _OF_PYDANTIC for extra in extras):
            return True
        if any(isinstance(extra, msgspec.Meta) for extra in extras):
            return False
    return any(is_of_pydantic(part) for part in get_args(hint) if part is not hint)


def shown(hint: Any) -> str:
    """Return a type approximately as its author wrote it."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and its component types."""
    yield hint
    arguments = get_args(hint)
    for part in arguments[:1] if get_origin(hint) is Annotated else arguments:
        yield from _parts(part)


_REFERENCES: Final = "#/$defs/{name}"
_USABLE: Final = (
    "str, int, float, bool, list, dict, Literal, Enum, Optional, date, datetime, a dataclass, a TypedDict or a"
    " pydantic model"
)

Models = dict[str, "pydantic.TypeAdapter[Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A tool function's signature: its arguments schema, and how to bind arguments."""

    description: str
    arguments_schema: Mapping[str, Any]
    # The name of the parameter that gets the ToolContext; empty if no parameter does.
    context_parameter: str
    _struct: type[msgspec.Struct]
    _models: Models
    _defaults: Mapping[str, Any]

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arguments that match the schema to typed parameters.

        Defaults are copied, so that calls do not share mutable values.

        Raises:
            msgspec.ValidationError, pydantic.ValidationError: An argument matches the schema, but not the stricter
                type.
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
    """Read a function's signature.

    A parameter may have any type that msgspec or pydantic can express as JSON Schema: str, int, float, bool, date,
    Literal, Enum, Optional, list, dict, dataclass, TypedDict, msgspec.Struct and pydantic models. Descriptions come
    from the docstring or from a string in Annotated.

    Raises:
        ToolDefinitionError: A parameter has no type, a type without a JSON Schema, or a default that does not match its
            type.
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
                both = f"{context_parameter} and {parameter.name} are both ToolContext parameters"
                raise ToolDefinitionError(f"{name}: {both}; only one is allowed")
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
    """Return a parameter's pydantic adapter, or None if msgspec can handle the parameter.

    Raises:
        ToolDefinitionError: Neither library can handle the parameter.
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
        # Only this part of pydantic's message is useful to the author.
        advice = str(error).partition("\n")[0].rstrip(".")
        instead = advice.replace("Please use", "write") if advice.startswith("Please use") else f"write {_USABLE}"
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
            # Unknown fields would be dropped silently.
            definition.setdefault("additionalProperties", False)
    for parameter, model in models.items():
        made = model.json_schema(ref_template="#/$defs/{model}")
        own = made.pop("$defs", {})
        if any(definitions.get(key, value) != value for key, value in own.items()):
            # Another class already uses that name.
            made = model.json_schema(ref_template=f"#/$defs/{parameter}_{{model}}")
            own = {f"{parameter}_{key}": value for key, value in made.pop("$defs", {}).items()}
        definitions |= own
        schema["properties"][parameter] = made | schema["properties"][parameter]
    return schema | ({"$defs": definitions} if definitions else {})


def _add_default(
    schema: dict[str, Any], parameter: str, default: Any, model: pydantic.TypeAdapter[Any] | None, name: str
) -> None:
    """Add a default to the schema.

    Raises:
        ToolDefinitionError: The schema is unusable, or the default is a pydantic `Field`, is not JSON, or does not
            match its type.
    """
    place = f"{name}: parameter {parameter}"
    if isinstance(default, FieldInfo):
        raise ToolDefinitionError(f"{place}: put its Field inside Annotated, as in Annotated[int, Field(ge=1)] = 1")
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
        instead = "; add | None to the type" if value is None else ""
        raise ToolDefinitionError(f"{place}: its default {default!r} does not match its type{instead}")
    part["default"] = value


def _json_of(default: Any, model: pydantic.TypeAdapter[Any] | None) -> JsonValue:
    if model is None:
        return plain(default)
    return plain(model.dump_python(default, mode="json", by_alias=True, warnings=False))
