"""Questions that MCP servers ask users (elicitation), and the users' answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import mcp.types
import pydantic

from pawl.chassis.ids import StoreId
from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.errors import InvalidSchema, PawlError
from pawl.server.egress.policy import EgressRefused, read_target
from pawl.tool_registry.catalog.ports import Helper, TooCostly
from pawl.tool_registry.rules.check import is_quick
from pawl.tool_registry.rules.fitting import fit
from pawl.tool_registry.sources.rules import plain_schema
from pawl.tools.rules.definition import OPTION_CHARACTERS_MAX, OPTIONS_MAX, QUESTION_CHARACTERS_MAX
from pawl.tools.rules.schema import compile_schema, list_violations, weigh
from pawl.tools.sdk.context import QuestionDeclined

Asked: TypeAlias = mcp.types.ElicitRequestParams
# Removes secrets and characters that cannot be stored from a server's text.
Clean = Callable[[str], str]
# The type of `ToolContext.ask`.
Ask = Callable[..., Awaitable[str]]

ANSWER_BYTES_MAX: Final = 64 * 1024
SCHEMA_BYTES_MAX: Final = 16 * 1024
_READ_CPU_SECONDS: Final = 1.0
_MESSAGE_CHARACTERS_MAX: Final = 2000
_NOTE_CHARACTERS_MAX: Final = 300
_LISTED_CHOICES_MAX: Final = 50
_PROBLEM_CHARACTERS_MAX: Final = 400
_YES: Final = frozenset({"yes", "y", "true", "done", "ok"})
_NO: Final = frozenset({"no", "n", "false", "not now"})
_ANY_OBJECT: Final = b'{"type":"object"}'
_KINDS: Final = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


class UnanswerableQuestion(Exception):
    """Raised when a user cannot answer the question. The message contains the reason."""


class InvalidAnswer(Exception):
    """Raised when the answer does not match the question. The message describes a matching answer."""


class Reader:
    """A parser for the answers of one store.

    Answers that are slow to parse are parsed in a helper process, which has limits.
    """

    def __init__(self, helper: Helper, store_id: StoreId) -> None:
        self._helper = helper
        self._store_id = store_id

    async def read(self, form: _Form, answer: str) -> mcp.types.ElicitResult:
        """Return the response to the server for an answer.

        Raises:
            InvalidAnswer: The answer does not match, or takes too long to check.
            Overloaded, DependencyUnavailable: The answer cannot be checked now.
        """
        if is_quick(form.weight, answer.encode(errors="replace")):
            return form.result(answer)
        try:
            return await self._helper.run(self._store_id, form.result, answer, cpu_seconds=_READ_CPU_SECONDS)
        except TooCostly:
            raise InvalidAnswer("it takes too long to check; give a shorter answer") from None

    async def answer_problem(self, schema_json: bytes, answer: str) -> str:
        """Return why an answer does not match its question's schema, or an empty string if it matches.

        If the schema cannot be parsed, every answer matches.

        Raises:
            Overloaded, DependencyUnavailable: The answer cannot be checked now.
        """
        try:
            schema = loads(schema_json, bytes_max=SCHEMA_BYTES_MAX)
            requested_schema = schema if isinstance(schema, dict) else {}
            form = _form(mcp.types.ElicitRequestFormParams(message="", requested_schema=requested_schema), str)
        except (PawlError, UnanswerableQuestion):
            return ""
        try:
            await self.read(form, answer)
        except InvalidAnswer as problem:
            return str(problem)[:_PROBLEM_CHARACTERS_MAX]
        return ""


async def ask_person(asked: Asked, ask: Ask, *, source: str, clean: Clean, reader: Reader) -> mcp.types.ElicitResult:
    """Ask a user the server's question, and return the response to the server.

    If the first answer does not match, the question is asked once more. The response is `decline` if the user does not
    answer, or if the second answer does not match either. The function is deterministic, so that a call can be repeated
    with the answers that it already has.

    Raises:
        UnanswerableQuestion: A user cannot answer the question.
        ToolError: See `ToolContext.ask`, except that declined questions do not raise.
        Overloaded, DependencyUnavailable: The answer cannot be checked now.
    """
    form = _form(asked, clean)
    why = f"The MCP server {source} asks this during a call."
    kind = "clarification" if form.properties else "confirmation"
    text = form.text
    try:
        for _ in range(2):
            answer = await ask(text, why=why, kind=kind, options=form.options, answer_schema_json=form.schema_json)
            try:
                return await reader.read(form, answer)
            except InvalidAnswer as problem:
                text = f"That answer is not valid: {str(problem)[:_PROBLEM_CHARACTERS_MAX]}\n{form.text}"
    except QuestionDeclined:
        pass
    return mcp.types.ElicitResult(action="decline")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A question in the form that a user sees. Can be pickled.

    A form without properties asks for yes or no. With one property, the answer is the value of that property. With
    several properties, the answer is a JSON object.
    """

    text: str
    options: Sequence[str]
    properties: Mapping[str, Mapping[str, Any]]
    schema: dict[str, Any]
    # The schema to show; empty if it contains secrets or is too large.
    schema_json: bytes
    # The schema's weight; see `schema.weigh`.
    weight: float = 0.0
    has_content: bool = True

    def result(self, answer: str) -> mcp.types.ElicitResult:
        """Return the response to the server for an answer.

        Raises:
            InvalidAnswer: The answer does not match.
        """
        if not self.properties:
            action: Literal["accept", "decline"] = "accept" if _is_yes(answer) else "decline"
            return mcp.types.ElicitResult(action=action, content={} if _is_yes(answer) and self.has_content else None)
        value: Any = _json(answer)
        if len(self.properties) == 1:
            value = {name: _value(schema, answer) for name, schema in self.properties.items()}
        elif not isinstance(value, dict):
            names = ", ".join(f'"{name}": ...' for name in self.properties)
            raise InvalidAnswer(f"it must be a JSON object like {{{names}}}")
        value = fit(self.schema, value).value
        violations = list_violations(self.schema, compile_schema(self.schema), value)
        if violations:
            raise InvalidAnswer("; ".join(violations))
        try:
            return mcp.types.ElicitResult.model_validate({"action": "accept", "content": value})
        except pydantic.ValidationError:
            raise InvalidAnswer("its values must be strings, numbers, booleans, or lists of strings") from None


def _form(asked: Asked, clean: Clean) -> _Form:
    message = clean(asked.message).strip()[:_MESSAGE_CHARACTERS_MAX] or "The server sent no text for its question."
    if isinstance(asked, mcp.types.ElicitRequestURLParams):
        return _page(message, clean(asked.url))
    schema = plain_schema(asked.requested_schema)
    given = schema.get("properties") or {}
    if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
        raise UnanswerableQuestion("the answer's schema is invalid")
    if not given:
        return _Form(text=message, options=("yes", "no"), properties={}, schema={}, schema_json=_ANY_OBJECT)
    try:
        compile_schema(schema)
    except InvalidSchema as error:
        raise UnanswerableQuestion(error.message) from None
    properties = {name: _branch(one) for name, one in given.items()}
    options = _options(properties, clean)
    text = _text(message, properties, schema.get("required") or (), options, clean)
    if len(text) > QUESTION_CHARACTERS_MAX - _PROBLEM_CHARACTERS_MAX - 100:
        raise UnanswerableQuestion("the question is too long")
    schema_json = dumps_canonical(schema)
    is_shown = len(schema_json) <= SCHEMA_BYTES_MAX and all(clean(text) == text for text in _texts(schema))
    return _Form(
        text=text,
        options=options,
        properties=properties,
        schema=schema,
        schema_json=schema_json if is_shown else b"",
        weight=weigh(schema),
    )


def _page(message: str, url: str) -> _Form:
    """Return a form that asks whether the user has opened a page. Pawl does not track what happens on that page."""
    try:
        host = read_target(url).host
    except EgressRefused as refused:
        raise UnanswerableQuestion(f"it asks the user to open a page, but {refused}") from None
    text = f"{message}\nOpen this page of {host} yourself, if you trust it: {url}\nIs it done?"
    if len(text) > QUESTION_CHARACTERS_MAX - _PROBLEM_CHARACTERS_MAX - 100:
        raise UnanswerableQuestion("the URL of its page is too long")
    return _Form(
        text=text, options=("done", "no"), properties={}, schema={}, schema_json=_ANY_OBJECT, has_content=False
    )


def _options(properties: Mapping[str, Mapping[str, Any]], clean: Clean) -> Sequence[str]:
    if len(properties) > 1:
        return ()
    (schema,) = properties.values()
    labels = ["yes", "no"] if schema.get("type") == "boolean" else [clean(label) for label, _ in _choices(schema)]
    fits = len(labels) <= OPTIONS_MAX and all(1 <= len(label) <= OPTION_CHARACTERS_MAX for label in labels)
    return labels if fits else ()


def _text(
    message: str,
    properties: Mapping[str, Mapping[str, Any]],
    required: Collection[Any],
    options: Sequence[str],
    clean: Clean,
) -> str:
    if len(properties) == 1:
        (schema,) = properties.values()
        is_open = not options and (schema.get("type") == "array" or bool(_choices(schema)))
        return clean("\n".join([message, *_about(schema, _kind(schema) if is_open else "")]))
    lines = [
        f"- {name}: {'; '.join([*_about(one, _kind(one)), 'required' if name in required else 'optional'])}"
        for name, one in properties.items()
    ]
    return clean("\n".join([message, "Answer with a JSON object with these properties:", *lines]))


def _about(schema: Mapping[str, Any], kind: str) -> list[str]:
    default = f"default {dumps_canonical(schema['default']).decode()}" if "default" in schema else ""
    notes = [schema.get("title"), schema.get("description"), kind, default]
    return [str(note)[:_NOTE_CHARACTERS_MAX] for note in notes if note]


def _kind(schema: Mapping[str, Any]) -> str:
    values = [label for label, _ in _choices(_items(schema) if schema.get("type") == "array" else schema)]
    if schema.get("type") == "array":
        return f"any of {_listed(values)}, as a JSON array" if values else "a JSON array"
    return f"one of {_listed(values)}" if values else _KINDS.get(str(schema.get("type")), "text")


def _texts(value: JsonValue) -> Iterator[str]:
    match value:
        case dict():
            for name, item in value.items():
                yield name
                yield from _texts(item)
        case list():
            for item in value:
                yield from _texts(item)
        case _:
            yield str(value)


def _choices(schema: Mapping[str, Any]) -> list[tuple[str, str]]:
    titled = schema.get("oneOf") or schema.get("anyOf")
    if isinstance(titled, list):
        consts = [one for one in titled if isinstance(one, Mapping) and isinstance(one.get("const"), str)]
        return [(str(one.get("title") or one["const"]), str(one["const"])) for one in consts]
    values = schema.get("enum")
    values = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    names = schema.get("enumNames")
    names = names if isinstance(names, list) and len(names) == len(values) else values
    return [(str(name), value) for name, value in zip(names, values, strict=True)]


def _branch(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    branches = schema.get("anyOf")
    real = [one for one in branches if one != {"type": "null"}] if isinstance(branches, list) else []
    return {**schema, **real[0]} if len(real) == 1 and isinstance(real[0], Mapping) else schema


def _items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    items = schema.get("items")
    return items if isinstance(items, Mapping) else {}


def _value(schema: Mapping[str, Any], answer: str) -> JsonValue:
    kind = schema.get("type")
    if kind == "boolean":
        return _is_yes(answer)
    if kind == "array" and not answer.lstrip().startswith("["):
        return [_choice(_items(schema), part) for part in map(str.strip, answer.split(",")) if part]
    return _choice(schema, answer)


def _choice(schema: Mapping[str, Any], answer: str) -> str:
    choices = _choices(schema)
    if not choices:
        return answer
    wanted = answer.strip()
    for fold in (str, str.casefold):
        found = {value for label, value in choices if fold(wanted) in (fold(label), fold(value))}
        if len(found) == 1:
            return found.pop()
    raise InvalidAnswer(f"it must be one of {_listed([label for label, _ in choices])}")


def _json(answer: str) -> JsonValue:
    try:
        return loads(answer.encode(), bytes_max=ANSWER_BYTES_MAX)
    except (PawlError, UnicodeEncodeError):
        return None


def _is_yes(answer: str) -> bool:
    word = answer.strip().rstrip(".!").casefold()
    if word not in _YES | _NO:
        raise InvalidAnswer("it must be yes or no")
    return word in _YES


def _listed(choices: Sequence[str]) -> str:
    more = f" and {len(choices) - _LISTED_CHOICES_MAX} more" if len(choices) > _LISTED_CHOICES_MAX else ""
    return ", ".join(choices[:_LISTED_CHOICES_MAX]) + more
