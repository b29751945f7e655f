"""Templates: JSON values whose strings may contain CEL expressions, as in `Hello ${input.name}`.

A string that is exactly one `${...}` becomes the value of the expression, with its type. In other strings, values are
inserted: strings unchanged, other values as JSON. `$${` is a literal `${`. A path such as `nodes.fetch.output.lines[0]`
is resolved without CEL, so its data may be larger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.expression import Environment, ExpressionError, Meter
from pawl.tools.rules.schema import did_you_mean

CHARACTERS_MAX: Final = 1000
RESULT_BYTES_MAX: Final = 1024 * 1024
# Maximum number of names in a hint.
_KNOWN_MAX: Final = 10
# Names that an expression may use, each with its allowed fields; None allows any field.
Names: TypeAlias = Mapping[str, frozenset[str] | None]

_NODE_FIELDS: Final = frozenset({"output", "error", "state"})
_PLAIN: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d{1,6}\])*", re.ASCII)
_STEP: Final = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]", re.ASCII)
# A string literal of CEL.
_TEXT: Final = r"""[rR](?:"[^"]*"|'[^']*')|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
# A string literal, or a name with its fields. A field before "(" is a function.
_NAME: Final = r"(?<![\w.])([A-Za-z_]\w*(?:\s*\.\s*[A-Za-z_]\w*(?!\w*\s*\())*)(\s*\()?"
_TOKEN: Final = re.compile(f"{_TEXT}|{_NAME}", re.ASCII)
# The tokens that determine the end of an expression.
_STOPS: Final = re.compile(f"{_TEXT}|[{{}}]")
_WORDS: Final = frozenset({"true", "false", "null", "in"})
_UNDECLARED: Final = re.compile(r"undeclared reference to '(\w+)")
_encode: Final = msgspec.json.Encoder().encode
_Path: TypeAlias = tuple[str | int, ...]


class DefinitionFault(msgspec.Struct, frozen=True):
    """A fault in a definition. `path` is its position in the document, and `hint` suggests a fix."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.path}: {self.message}{hint}" if self.path else f"{self.message}{hint}"


class Inserted(NamedTuple):
    """An expression in a template."""

    source: str

    @property
    def path(self) -> _Path | None:
        """Fields and indexes of a plain path, or None for any other expression."""
        return _plain_path(self.source)


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: similar names or, if there are none, the known names."""
    names = sorted(known)
    shown = [*names[:_KNOWN_MAX], *(["..."] if len(names) > _KNOWN_MAX else [])]
    return did_you_mean(name, names).removeprefix("; ") or f"known: {', '.join(shown) or 'none'}"


def references(template: Any) -> frozenset[str]:
    """Return the names of the nodes that a template reads."""
    return frozenset(path[1] for path in _read_paths(template) if path[0] == "nodes" and len(path) > 1)


def token_names(template: Any, waits: frozenset[str]) -> frozenset[str]:
    """Return the nodes in `waits` whose tokens a template uses."""
    paths = [path for path in _read_paths(template) if path[0] == "tokens"]
    # `tokens["a"]` and `tokens` may read any of them.
    return waits if any(len(path) == 1 for path in paths) else waits.intersection(path[1] for path in paths)


def is_name(name: str) -> bool:
    """Return whether an expression may use this name."""
    try:
        environment(("input",)).compile(f"[0].exists({name}, true)")
    except ExpressionError:
        return False
    return True


def count(template: Any) -> int:
    """Return the number of expressions in a template."""
    return sum(1 for _ in _inserted(template))


def is_expression(text: str) -> bool:
    """Return whether a string is exactly one `${...}`."""
    try:
        parts = split(text)
    except ExpressionError:
        return False
    return len(parts) == 1 and isinstance(parts[0], Inserted)


def check(template: Any, names: Names, path: str = "") -> list[DefinitionFault]:
    """Return all faults in a template's expressions."""
    found = []
    for where, text in _strings(template, path):
        try:
            parts = split(text)
        except ExpressionError as error:
            found.append(DefinitionFault(where, str(error)))
            continue
        for part in parts:
            if isinstance(part, Inserted):
                found += _check_expression(part.source, names, where)
    return found


def result_type(text: str, names: Names) -> str:
    """Return the CEL type, such as BOOL, of a string that consists of a single checked expression.

    DYN means that the type depends on the data.
    """
    (part,) = _inserted(text)
    if part.path is not None:
        return "DYN"
    kind: str = environment(tuple(sorted(names))).compile(part.source).return_type().name()
    return kind.partition("<")[0]


def render(template: Any, scope: Mapping[str, Any]) -> Any:
    """Return the template with its expressions replaced by their values.

    Raises:
        ExpressionError: An expression fails, or the expressions cost too much or return more than RESULT_BYTES_MAX.
    """
    return _Rendering(scope).rendered(template)


@lru_cache(maxsize=1024)
def split(text: str) -> tuple[str | Inserted, ...]:
    """Return the parts of a template string.

    Raises:
        ExpressionError: An expression has no end.
    """
    parts: list[str | Inserted] = []
    literal, position = "", 0
    while (start := text.find("${", position)) >= 0:
        if text.startswith("$", start - 1) and start > position:
            literal += text[position : start - 1] + "${"
            position = start + 2
            continue
        literal += text[position:start]
        end = _end(text, start + 2)
        parts += [literal] if literal else []
        parts.append(Inserted(text[start + 2 : end].strip()))
        literal, position = "", end + 1
    literal += text[position:]
    return (*parts, literal) if literal or not parts else tuple(parts)


def _end(text: str, start: int) -> int:
    depth = 0
    for found in _STOPS.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth < 0:
            return found.start()
    raise ExpressionError(
        f"the expression {text[start - 2 : start + 40]!r} has no closing brace; write $${{ for a literal ${{"
    )


def _strings(template: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(template, str):
        yield path, template
    elif isinstance(template, Mapping):
        for name, value in template.items():
            yield from _strings(value, f"{path}.{name}" if path else name)
    elif isinstance(template, list | tuple):
        for index, value in enumerate(template):
            yield from _strings(value, f"{path}[{index}]")


def _inserted(template: Any) -> Iterator[Inserted]:
    for _, text in _strings(template, ""):
        try:
            yield from (part for part in split(text) if isinstance(part, Inserted))
        except ExpressionError:
            continue


@lru_cache(maxsize=1024)
def _plain_path(source: str) -> _Path | None:
    if not _PLAIN.fullmatch(source) or source in _WORDS:
        return None
    return tuple(name or int(index) for name, index in _STEP.findall(source))


@lru_cache(maxsize=1024)
def _paths(source: str) -> frozenset[tuple[str, ...]]:
    """Return the paths of names and fields that an expression reads."""
    found = (match for match in _TOKEN.finditer(source) if match[1])
    paths = (tuple(re.split(r"\s*\.\s*", match[1])) for match in found if not match[2])
    return frozenset(path for path in paths if path[0] not in _WORDS)


def _read_paths(template: Any) -> Iterator[tuple[str, ...]]:
    return (path for each in _inserted(template) for path in _paths(each.source))


def _check_expression(source: str, names: Names, where: str) -> list[DefinitionFault]:
    if not source:
        return [DefinitionFault(where, "an expression is empty", "write $${ for a literal ${")]
    found = [fault for path in sorted(_paths(source)) for fault in _check_path(path, names, where)]
    plain = _plain_path(source)
    unknown = None if plain is None or plain[0] in names else str(plain[0])
    if plain is None:
        try:
            environment(tuple(sorted(names))).compile(source)
        except ExpressionError as error:
            undeclared = _UNDECLARED.search(str(error))
            unknown = None if undeclared is None else undeclared[1]
            found = found or ([DefinitionFault(where, f"{source!r}: {error}")] if unknown is None else [])
    if unknown is not None:
        found.append(DefinitionFault(where, f"there is no {unknown!r} here", near(unknown, names)))
    return found


def _check_path(path: tuple[str, ...], names: Names, where: str) -> list[DefinitionFault]:
    if path[0] not in names:
        # CEL reports it, unless it is the variable of a macro.
        return []
    fields = names[path[0]]
    if path[0] == "nodes" and len(path) == 1:
        return [DefinitionFault(where, "nodes cannot be used as a value", "write nodes.NAME.output")]
    if fields is not None and len(path) > 1 and path[1] not in fields:
        return [DefinitionFault(where, f"{path[0]}.{path[1]} does not exist", near(path[1], fields))]
    if path[0] == "nodes" and not _NODE_FIELDS.issuperset(path[2:3] or ("",)):
        return [DefinitionFault(where, f"{'.'.join(path[:3])} does not exist", f"write nodes.{path[1]}.output")]
    return []


class _Rendering:
    """Renders one template. Its expressions share the limits."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self._scope = scope
        self._environment = environment(tuple(sorted(scope)))
        self._meter = Meter()
        self._bytes_left = RESULT_BYTES_MAX

    def rendered(self, template: Any) -> Any:
        if isinstance(template, Mapping):
            return {name: self.rendered(value) for name, value in template.items()}
        if isinstance(template, list | tuple):
            return [self.rendered(value) for value in template]
        if not isinstance(template, str):
            return template
        parts = [part if isinstance(part, str) else self._value(part) for part in split(template)]
        return parts[0] if len(parts) == 1 else "".join(map(_text, parts))

    def _value(self, part: Inserted) -> Any:
        if part.path is not None:
            value = _followed(part.path, self._scope)
        else:
            used = _used(_paths(part.source), self._scope)
            value = self._environment.evaluate(part.source, {**dict.fromkeys(self._scope), **used}, self._meter)
        self._bytes_left -= len(_encode(value))
        if self._bytes_left < 0:
            raise ExpressionError(f"the values are over the limit of {RESULT_BYTES_MAX} bytes")
        return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


def _followed(path: _Path, scope: Mapping[str, Any]) -> Any:
    value: Any = scope
    for position, step in enumerate(path):
        if not _has(value, step):
            shown = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path[: position + 1])
            raise ExpressionError(f"{shown.removeprefix('.')} does not exist")
        value = value[step]
    return value


def _has(value: Any, step: str | int) -> bool:
    if isinstance(step, str):
        return isinstance(value, Mapping) and step in value
    return isinstance(value, list) and step < len(value)


def _used(paths: frozenset[tuple[str, ...]], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the scope that an expression uses, because CEL would convert the whole scope."""
    used: dict[str, Any] = {}
    for path in sorted(paths):
        source: Any = scope
        target: Any = used
        for position, step in enumerate(path):
            # A shorter path may already contain this one.
            if not _has(source, step) or (step in target and target[step] is source[step]):
                break
            source = source[step]
            if position == len(path) - 1 or not isinstance(source, Mapping):
                target[step] = source
                break
            target = target.setdefault(step, {})
    return used


@lru_cache(maxsize=64)
def environment(names: tuple[str, ...]) -> Environment:
    return Environment(dict.fromkeys(names, "dyn"), characters_max=CHARACTERS_MAX, bytes_max=RESULT_BYTES_MAX)
