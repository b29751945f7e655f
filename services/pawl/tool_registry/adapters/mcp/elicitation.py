"""Questions of MCP servers (elicitation), put so that a person can answer in a line, and the answers read back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import mcp.types

from pawl.chassis.egress_rules import EgressRefused, read_target
from pawl.chassis.ids import StoreId
from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.errors import InvalidSchema, PawlError
from pawl.tool_registry.app.catalog.ports import Helper, TooCostly
from pawl.tool_registry.domain.check import is_quick
from pawl.tool_registry.domain.question import OPTION_CHARACTERS_MAX, OPTIONS_MAX, QUESTION_CHARACTERS_MAX
from pawl.tool_registry.domain.schema import compile_schema, weigh
from pawl.tool_registry.domain.source import plain_schema
from pawl.tool_registry.domain.violations import list_violations
from pawl.tool_registry.sdk.context import QuestionDeclined
from pawl.values import QuestionKind

Asked: TypeAlias = mcp.types.ElicitRequestParams
Content: TypeAlias = dict[str, str | int | float | bool | list[str] | None]
Clean = Callable[[str], str]
"""Takes out of a text of the server what people must not see, and what cannot be stored."""
Ask = Callable[..., Awaitable[str]]
"""`ToolContext.ask`."""

ANSWER_BYTES_MAX: Final = 64 * 1024
SCHEMA_BYTES_MAX: Final = 16 * 1024
_READ_CPU_SECONDS: Final = 1.0
_MESSAGE_CHARACTERS_MAX: Final = 2000
_NOTE_CHARACTERS_MAX: Final = 300
_LISTED_CHOICES_MAX: Final = 50
_PROBLEM_CHARACTERS_MAX: Final = 400
_YES: Final = frozenset({"yes", "y", "true", "done", "ok"})
_NO: Final = frozenset({"no", "n", "false", "not now"})
_KINDS: Final = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


class Unaskable(Exception):
    """A question that cannot be put to a person; the text says why."""


class Unreadable(Exception):
    """An answer that is not what was asked for; the text tells the person what would be."""


class Reader:
    """Reads answers for one store: what is quick at once, and the rest by a helper, where it is bounded."""

    def __init__(self, helper: Helper, store_id: StoreId) -> None:
        self._helper = helper
        self._store_id = store_id

    async def read(self, form: _Form, answer: str) -> mcp.types.ElicitResult:
        """Return what the server gets for an answer.

        Raises:
            Unreadable: it does not fit, or it takes too long to find out.
            Overloaded, DependencyUnavailable: it cannot be read now.
        """
        if is_quick(form.weight, answer.encode(errors="replace")):
            return form.result(answer)
        try:
            return await self._helper.run(self._store_id, form.result, answer, cpu_seconds=_READ_CPU_SECONDS)
        except TooCostly:
            raise Unreadable("it takes too long to be checked: answer with less") from None

    async def misfit(self, schema_json: bytes, answer: str) -> str:
        """Return what is wrong with an answer to a question with this schema, and what would fit; empty if it fits.

        Of a schema that is none nothing is known: any answer fits.

        Raises:
            Overloaded, DependencyUnavailable: it cannot be read now.
        """
        try:
            schema = loads(schema_json, bytes_max=SCHEMA_BYTES_MAX)
            requested_schema = schema if isinstance(schema, dict) else {}
            form = _form(mcp.types.ElicitRequestFormParams(message="", requested_schema=requested_schema), str)
        except (PawlError, Unaskable):
            return ""
        try:
            await self.read(form, answer)
        except Unreadable as problem:
            return str(problem)[:_PROBLEM_CHARACTERS_MAX]
        return ""


async def put(asked: Asked, ask: Ask, *, tool: str, clean: Clean, reader: Reader) -> mcp.types.ElicitResult:
    """Ask a person what a server asks, once more if the answer does not fit, and return what the server gets.

    It gets a decline if nobody answers, or if the second answer does not fit
    either. The same question and the same answers always lead to the same
    questions, so a call can be run again with the answers that it got.

    Raises:
        Unaskable: it cannot be put to a person.
        ToolError: as `ToolContext.ask`, except for a question that nobody answers.
        Overloaded, DependencyUnavailable: an answer cannot be read now.
    """
    form = _form(asked, clean)
    why = f"The MCP server of {tool} asks this in the middle of the call."
    text = form.text
    try:
        for _ in range(2):
            answer = await ask(text, why=why, kind=form.kind, options=form.options, answer_schema_json=form.schema_json)
            try:
                return await reader.read(form, answer)
            except Unreadable as problem:
                text = f"That does not fit: {str(problem)[:_PROBLEM_CHARACTERS_MAX]}\n{form.text}"
    except QuestionDeclined:
        pass
    return mcp.types.ElicitResult(action="decline")


def _form(asked: Asked, clean: Clean) -> _Form:
    message = clean(asked.message).strip()[:_MESSAGE_CHARACTERS_MAX] or "It has no words for its question."
    form: _Form
    if isinstance(asked, mcp.types.ElicitRequestURLParams):
        form = _page(message, clean(asked.url))
    else:
        schema = plain_schema(asked.requested_schema)
        properties = schema.get("properties") or {}
        if not isinstance(properties, Mapping) or not all(isinstance(one, Mapping) for one in properties.values()):
            raise Unaskable("the schema of the answer cannot be read")
        confirmation = _YesOrNo(message, options=("yes", "no"), content={})
        form = _Fields(message, schema, properties, clean) if properties else confirmation
    if len(form.text) > QUESTION_CHARACTERS_MAX - _PROBLEM_CHARACTERS_MAX - 100:
        raise Unaskable("it asks for more than fits into a question")
    return form


def _public(schema: JsonValue, clean: Clean) -> bytes:
    """Return a schema as people may see it; empty if they may not, or if it is too large."""
    schema_json = dumps_canonical(schema)
    is_shown = len(schema_json) <= SCHEMA_BYTES_MAX and all(clean(text) == text for text in _texts(schema))
    return schema_json if is_shown else b""


def _texts(value: JsonValue) -> Iterator[str]:
    """Return the texts in a value, names of properties and numbers too."""
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


class _YesOrNo:
    """Nothing is asked for but a yes, which stands for `content`."""

    schema_json = b'{"type":"object"}'
    weight = 0.0
    kind = QuestionKind.CONFIRMATION

    def __init__(self, text: str, options: Sequence[str], content: Content | None) -> None:
        self.text = text
        self.options = options
        self._content = content

    def result(self, answer: str) -> mcp.types.ElicitResult:
        """Return an acceptance or a decline."""
        if _is_yes(answer):
            return mcp.types.ElicitResult(action="accept", content=self._content)
        return mcp.types.ElicitResult(action="decline")


def _page(message: str, url: str) -> _YesOrNo:
    """Return the question for a page that the person should open; what happens there is between the two."""
    try:
        host = read_target(url).host
    except EgressRefused as refused:
        raise Unaskable(f"it wants a page to be opened, but {refused}") from None
    text = f"{message}\nOpen this page of {host} yourself, if you trust it: {url}\nIs it done?"
    return _YesOrNo(text, options=("done", "no"), content=None)


class _Fields:
    """Values: a single one is answered as it is, several as a JSON object. `weight` is that of the schema."""

    kind = QuestionKind.CLARIFICATION

    def __init__(self, message: str, schema: dict[str, Any], properties: Mapping[str, Any], clean: Clean) -> None:
        try:
            compile_schema(schema)
        except InvalidSchema as error:
            raise Unaskable(error.message) from None
        self._schema = schema
        self.weight = weigh(schema)
        self.schema_json = _public(schema, clean)
        self._properties = {name: _branch(one) for name, one in properties.items()}
        properties = self._properties
        required = schema.get("required")
        self._required = frozenset(required) if isinstance(required, list) else frozenset()
        self._only = next(iter(properties)) if len(properties) == 1 else ""
        self.options: Sequence[str] = ()
        if self._only:
            labels = [clean(label) for label, _ in _choices(properties[self._only])]
            labels = ["yes", "no"] if properties[self._only].get("type") == "boolean" else labels
            fits = len(labels) <= OPTIONS_MAX and all(1 <= len(label) <= OPTION_CHARACTERS_MAX for label in labels)
            self.options = labels if fits else ()
            self.text = "\n".join([message, *self._about(self._only, clean)])
        else:
            lines = [f"- {name}: {'; '.join(self._about(name, clean))}" for name in properties]
            self.text = clean("\n".join([message, "Answer with a JSON object of these properties:", *lines]))

    def result(self, answer: str) -> mcp.types.ElicitResult:
        """Return the content that an answer stands for, which fits the schema."""
        value = {self._only: _value(self._properties[self._only], answer)} if self._only else self._object(answer)
        violations = list_violations(self._schema, compile_schema(self._schema), value)
        if violations:
            raise Unreadable("; ".join(violations))
        return mcp.types.ElicitResult(action="accept", content=_content(value))

    def _object(self, answer: str) -> dict[str, JsonValue]:
        given = _json(answer)
        if not isinstance(given, dict):
            names = ", ".join(f'"{name}": ...' for name in self._properties)
            raise Unreadable(f"it must be a JSON object like {{{names}}}")
        defaults = {name: one["default"] for name, one in self._properties.items() if "default" in one}
        return {**defaults, **given}

    def _about(self, name: str, clean: Clean) -> list[str]:
        """Return what a person should know of a property."""
        schema = self._properties[name]
        notes = [str(schema[key]) for key in ("title", "description") if schema.get(key)]
        if schema.get("type") == "array":
            values = [value for _, value in _choices(_items(schema))]
            what = f"any of {_listed(values)}" if values else "a list"
            notes.append(f"{what}, as a JSON array" + (" or with commas between" if self._only else ""))
        elif not self._only:
            values = [value for _, value in _choices(schema)]
            notes.append(f"one of {_listed(values)}" if values else _KINDS.get(str(schema.get("type")), "text"))
        elif not self.options and _choices(schema):
            notes.append(f"one of {_listed([label for label, _ in _choices(schema)])}")
        limits = {"minimum": "at least", "maximum": "at most", "format": "as"}
        notes += [f"{words} {schema[key]}" for key, words in limits.items() if key in schema]
        if not self._only:
            notes.append("required" if name in self._required else "may be left out")
        if "default" in schema:
            notes.append(f"usually {dumps_canonical(schema['default']).decode()}")
        return [clean(note)[:_NOTE_CHARACTERS_MAX] for note in notes]


_Form: TypeAlias = _YesOrNo | _Fields
"""A question as a person sees it; can be pickled. Its `result` raises Unreadable."""


def _choices(schema: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the values that a text may have, each behind the words for it."""
    titled = schema.get("oneOf") or schema.get("anyOf")
    if isinstance(titled, list):
        consts = [one for one in titled if isinstance(one, Mapping) and isinstance(one.get("const"), str)]
        found = [(str(one.get("title") or one["const"]), str(one["const"])) for one in consts]
    else:
        values = schema.get("enum")
        values = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        names = schema.get("enumNames")
        names = names if isinstance(names, list) and len(names) == len(values) else values
        found = [(str(name), value) for name, value in zip(names, values, strict=True)]
    # Words that stand for two values would choose between them by chance.
    return found if len({label for label, _ in found}) == len(found) else [(value, value) for _, value in found]


def _branch(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an optional value is when it is there."""
    branches = schema.get("anyOf")
    real = [one for one in branches if one != {"type": "null"}] if isinstance(branches, list) else []
    return {**schema, **real[0]} if len(real) == 1 and isinstance(real[0], Mapping) else schema


def _items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    items = schema.get("items")
    return items if isinstance(items, Mapping) else {}


def _value(schema: Mapping[str, Any], answer: str) -> JsonValue:
    """Return the value of one property that an answer stands for."""
    match schema.get("type"):
        case "boolean":
            return _is_yes(answer)
        case "integer" | "number":
            return _number(answer)
        case "array":
            return [_choice(_items(schema), item) for item in _list(answer)]
        case _:
            return _choice(schema, answer)


def _choice(schema: Mapping[str, Any], answer: str) -> str:
    choices = _choices(schema)
    if not choices:
        return answer
    wanted = answer.strip().casefold()
    for label, value in choices:
        if answer.strip() in (label, value):
            return value
    found = {value for label, value in choices if wanted in (label.casefold(), value.casefold())}
    if len(found) != 1:
        raise Unreadable(f"it must be one of {_listed([label for label, _ in choices])}")
    return found.pop()


def _number(answer: str) -> int | float:
    value = _json(answer.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable("it must be a number")
    return value


def _list(answer: str) -> list[str]:
    value = _json(answer)
    if isinstance(value, list):
        return [item if isinstance(item, str) else dumps_canonical(item).decode() for item in value]
    return [part for part in map(str.strip, answer.split(",")) if part]


def _json(answer: str) -> JsonValue:
    """Return what an answer is as JSON, None if it is none."""
    try:
        return loads(answer.encode(), bytes_max=ANSWER_BYTES_MAX)
    except (PawlError, UnicodeEncodeError):
        return None


def _is_yes(answer: str) -> bool:
    word = answer.strip().rstrip(".!").casefold()
    if word not in _YES | _NO:
        raise Unreadable("it must be yes or no")
    return word in _YES


def _content(value: Mapping[str, JsonValue]) -> Content:
    content: Content = {}
    for name, item in value.items():
        if isinstance(item, list):
            content[name] = [str(one) for one in item]
        elif isinstance(item, dict):
            raise Unreadable(f"{name}: must not be an object")
        else:
            content[name] = item
    return content


def _listed(choices: Sequence[str]) -> str:
    more = f" and {len(choices) - _LISTED_CHOICES_MAX} more" if len(choices) > _LISTED_CHOICES_MAX else ""
    return ", ".join(choices[:_LISTED_CHOICES_MAX]) + more
