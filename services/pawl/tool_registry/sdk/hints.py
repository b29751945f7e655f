"""The types of a function's parameters: read where they were written, and told apart."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from datetime import datetime, time
from types import NoneType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgspec
import pydantic

from pawl.tool_registry.sdk.context import ToolContext

_OF_PYDANTIC: Final = ("pydantic", "annotated_types")


class ToolDefinitionError(TypeError):
    """A function cannot become a tool as it is written; the message says why, and what to write instead."""


def read_hints(function: Callable[..., Any], name: str) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yield the parameters of a function with their types; what it returns does not matter.

    Raises:
        ToolDefinitionError: a parameter cannot be named, has no type, or one that
            cannot be found.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolDefinitionError(
                f"{name}: {parameter} cannot be described to a model; write a parameter for each argument, which can"
                " be given by name"
            )
        if parameter.annotation is parameter.empty:
            if parameter.name in ("self", "cls"):
                raise ToolDefinitionError(f"{name}: a method cannot be a tool; write a function outside of the class")
            raise ToolDefinitionError(
                f"{name}: parameter {parameter.name} has no type; write for example {parameter.name}: str"
            )
        hint = _found(function, name, parameter)
        _refuse_what_says_nothing(hint, f"{name}: parameter {parameter.name}")
        yield parameter, hint


def _found(function: Callable[..., Any], name: str, parameter: inspect.Parameter) -> Any:
    def carrier() -> None:
        """Have one annotation, so that a missing name is that of one parameter."""

    carrier.__annotations__ = {parameter.name: parameter.annotation}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(carrier, globalns=names, include_extras=True)[parameter.name]
    except (NameError, AttributeError) as error:
        raise ToolDefinitionError(
            f"{name}: parameter {parameter.name}: {error}; its type must be a name at the top of the module, and not"
            " one that is imported for type checkers only (if TYPE_CHECKING)"
        ) from None
    except (SyntaxError, TypeError) as error:
        raise ToolDefinitionError(f"{name}: parameter {parameter.name}: {parameter.annotation!r}: {error}") from None


def _refuse_what_says_nothing(hint: Any, place: str) -> None:
    for part in _parts(hint):
        if isinstance(part, TypeVar):
            raise ToolDefinitionError(f"{place}: the type variable {part} says nothing to a model; write a type")
        if part in (pydantic.SecretStr, pydantic.SecretBytes):
            raise ToolDefinitionError(
                f"{place}: secrets do not come from the model; take a ToolContext and ask context.secret(name)"
            )


def is_context(hint: Any) -> bool:
    """Return whether a parameter gets the ToolContext, optional or annotated."""
    parts = [part for part in _parts(hint) if isinstance(part, type)]
    return ToolContext in parts and set(parts) <= {ToolContext, NoneType}


def text_of(hint: Any) -> str:
    """Return the first text, or `Doc`, in an Annotated, also within an Optional: what the parameter is for."""
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            text = extra if isinstance(extra, str) else getattr(extra, "documentation", None)
            if isinstance(text, str):
                return text
    if get_origin(hint) in (Annotated, typing.Union):
        return next(filter(None, map(text_of, get_args(hint))), "")
    return ""


def is_of_pydantic(hint: Any) -> bool:
    """Return whether pydantic knows more of a type than msgspec: own types, limits of its kind, and times as such."""
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
    """Return a type as its author wrote it, about."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and the types that it is made of."""
    yield hint
    arguments = get_args(hint)
    for part in arguments[:1] if get_origin(hint) is Annotated else arguments:
        yield from _parts(part)
