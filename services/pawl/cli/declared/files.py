"""Reads and writes files that declare resources. Errors include the file and the line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from google.protobuf.json_format import ParseError
from google.protobuf.message import Message

from pawl.chassis.ids import is_id
from pawl.cli import wording
from pawl.cli.command import read_file
from pawl.cli.declared.documents import InvalidDocument, Place, to_document, to_message
from pawl.cli.declared.rules import KINDS, Key, folder
from pawl.cli.failure import CommandError
from pawl.errors import PawlError
from pawl.settings.v1.settings_pb2 import SettingsLayer

SET_FILE: Final = "pawl.yaml"
# The subfolders of a set, one for each kind.
FOLDERS: Final = tuple(map(folder, KINDS))
ENDINGS: Final = (".yaml", ".yml", ".json")
_FILE_BYTES_MAX: Final = 1024 * 1024
_DEPTH_MAX: Final = 100
_BOOLEAN: Final = "tag:yaml.org,2002:bool"
# The names and indexes in a path.
PARTS: Final = re.compile(r"[^.\[\]]+")
# Maps of values by name, each with a corresponding map of secret names.
_VALUE_MAPS: Final = {"headers": "secret_headers", "environment": "secret_environment"}
_SECRET_NAME: Final = re.compile(r"auth|cookie|credential|key\b|passw|secret|token", re.IGNORECASE)
_SECRET_VALUE: Final = re.compile(
    r"(bearer\s+|whsec_|sk-)\S{8,}|[a-z]+://[^/@\s]*:[^/@\s]+@.*", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A resource as declared in a file."""

    key: Key
    definition: Any
    file: Path
    lines: Mapping[Place, int]

    def problem(self, text: str, field: str = "") -> str:
        """Return `text` as an error message that starts with the file and the line.

        The line is the one with the deepest field that `text` or `field` mentions.
        """
        return f"{self.file}:{_line(self.lines, f'{text} {field}')}: {text}"

    def faults(self, found: Iterable[tuple[str, str]]) -> list[str]:
        """Return errors sorted by line. `found` contains paths such as `nodes.fetch.after[0]`, each with a message."""
        known = {tuple(map(str, place)): line for place, line in self.lines.items()}
        lines = [(_line_of(known, path), f"{path + ': ' if path else ''}{text}") for path, text in found]
        return [f"{self.file}:{line}: {text}" for line, text in sorted(lines, key=lambda each: each[0])]


def read_set(folder: Path) -> str:
    """Return the name of the set in a folder, or an empty string if the folder has no pawl.yaml.

    Raises:
        CommandError: The file pawl.yaml is invalid.
    """
    file = folder / SET_FILE
    if not file.is_file():
        return ""
    try:
        found = yaml.load(read_file(file, _FILE_BYTES_MAX), _Loader)  # noqa: S506  # a safe loader
    except (yaml.YAMLError, ValueError) as error:
        raise CommandError(f"{file} is not YAML: {_short(error)}.") from None
    name = found.get("name") if isinstance(found, dict) and set(found) == {"name"} else None
    if not isinstance(name, str) or not is_id(name):
        raise CommandError(f"{file} must contain only `name: NAME`, where NAME has 1 to 64 letters, digits, _ and -.")
    return name


def read(paths: Sequence[Path], types: Mapping[str, type[Any]]) -> tuple[list[Asked], list[str]]:
    """Read resources from files and folders. Return the resources and the problems.

    In a folder with pawl.yaml, files are in subfolders that are named after kinds, such as `agents`.
    """
    found: dict[Key, Asked] = {}
    problems = [problem for path in paths if path.is_dir() for problem in _misnamed_folders(path)]
    for file in (file for path in paths for file in _files(path)):
        try:
            for asked in _documents(file, types, problems):
                if asked.key in found:
                    problems.append(asked.problem(f"the {asked.key.kind} {asked.key.name!r} is defined twice"))
                found[asked.key] = asked
        except CommandError as error:
            problems.append(str(error))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            text = getattr(error, "problem", None) or error
            problems.append(f"{file}:{mark.line + 1 if mark else 1}: not valid YAML: {_short(text)}")
    return list(found.values()), problems


def to_yaml(kind: str, definition: Message | Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """Return the content of a resource's file, followed by comments."""
    fields: dict[str, Any] = {} if kind == "agent" else {"kind": kind}
    if isinstance(definition, Message):
        fields |= to_document(definition)
    else:
        fields |= definition
    text: str = yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text + "".join(f"# {comment}\n" for comment in comments)


def without_secrets(name: str, definition: Any) -> list[str]:
    """Replace values that look like secrets with names of secrets. Return the names."""
    made: list[str] = []
    if not isinstance(definition, Message):
        return made
    for part in [definition, *(value for field, value in definition.ListFields() if field.message_type)]:
        for values, secrets in _VALUE_MAPS.items():
            held = getattr(part, values, {})
            for each in [each for each in held if _is_secret(each, held[each])]:
                del held[each]
                made.append(re.sub(r"[^A-Za-z0-9_-]", "-", f"{name}-{each}".lower()))
                getattr(part, secrets)[each] = made[-1]
    return made


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    folders = [path / name for name in FOLDERS] if (path / SET_FILE).is_file() else [path]
    return [file for each in folders if each.is_dir() for file in sorted(each.iterdir()) if file.suffix in ENDINGS]


def _misnamed_folders(path: Path) -> list[str]:
    """Return a problem for each of a set's subfolders that is not read although its name resembles a kind's name."""
    if not (path / SET_FILE).is_file():
        return []
    unknown = [each for each in sorted(path.iterdir()) if each.is_dir() and each.name not in FOLDERS]
    close = {each: difflib.get_close_matches(each.name.lower(), FOLDERS, n=1, cutoff=0.75) for each in unknown}
    return [
        f"{each} is not the name of a kind of resource: did you mean {found[0]}?"
        for each, found in close.items()
        if found
    ]


def _documents(file: Path, types: Mapping[str, type[Any]], problems: list[str]) -> Iterator[Asked]:
    content = read_file(file, _FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise CommandError(f"{file}:1: the file is larger than {_FILE_BYTES_MAX} bytes. Split it into several files.")
    loader = _Loader(content)
    try:
        while loader.check_node():
            node: Any = loader.get_node()
            lines = dict(_lines(node, ()))
            try:
                document = loader.construct_document(node)
                if document is None:
                    continue
                asked = _asked(file, document, lines, types)
            except yaml.YAMLError:
                raise
            except Exception as error:  # noqa: BLE001  # PyYAML raises many types for invalid values.
                known = isinstance(error, ParseError | PawlError)
                text = _short(error if known else f"invalid value: {error}")
                line = lines.get(error.place) if isinstance(error, InvalidDocument) else _line(lines, text)
                problems.append(f"{file}:{line or lines[()]}: {text}")
            else:
                problems += [
                    f"{file}:{lines.get(place, lines[()])}: {problem}" for place, problem in _secrets(document, ())
                ]
                yield asked
    finally:
        loader.dispose()


def _asked(file: Path, document: Any, lines: Mapping[Place, int], types: Mapping[str, type[Any]]) -> Asked:
    in_folder = [each for each in types if folder(each) == file.absolute().parent.name]
    usual = in_folder[0] if in_folder else "agent" if "agent" in types else next(iter(types))
    kind = document.get("kind", usual) if isinstance(document, dict) else usual
    if kind not in tuple(types):
        raise ParseError(f"kind must be one of {', '.join(types)}, not {kind!r}")
    named_by = "layer" if kind == "settings" else "name"
    if not isinstance(document, dict) or not isinstance(document.get(named_by), str) or not document[named_by]:
        raise ParseError(
            f"an {kind} must be a mapping with a `name`" if kind == "agent" else f"a {kind} needs a `{named_by}`"
        )
    fields = {name: value for name, value in document.items() if name != "kind"}
    if types[kind] is dict:  # A workflow, which is JSON. YAML reads times as dates.
        return Asked(Key(kind, document["name"]), json.loads(json.dumps(fields, default=str)), file, lines)
    definition: Any = to_message(fields, types[kind]())
    name = wording.short_name(SettingsLayer.DESCRIPTOR, definition.layer) if kind == "settings" else document["name"]
    return Asked(Key(kind, name), definition, file, lines)


def _secrets(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _secrets(each, (*place, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _secrets(each, (*place, index))
    elif isinstance(value, str):
        group = place[-2] if len(place) > 1 else ""
        is_value = group in _VALUE_MAPS and _is_secret(str(place[-1]), value)
        if is_value or _SECRET_VALUE.fullmatch(value):
            instead = f"name a secret in `{_VALUE_MAPS[str(group)]}`" if group in _VALUE_MAPS else "name a secret"
            yield place, f"{place[-1] if place else 'the value'} looks like a secret's value; {instead} instead"


def _is_secret(name: str, value: str) -> bool:
    return bool(value) and bool(_SECRET_NAME.search(name) or _SECRET_VALUE.fullmatch(value))


def _lines(node: yaml.Node, place: Place) -> Iterator[tuple[Place, int]]:
    """Yield the line of each position in a document."""
    yield place, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, key.value)
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*place, index))


def _line(lines: Mapping[Place, int], text: str) -> int:
    words = set(re.findall(r"\w+", text))
    names = [place for place in lines if place and str(place[-1]) in words]
    return lines[max(names, key=lambda place: (len(words & {str(each) for each in place}), len(place)), default=())]


def _line_of(known: Mapping[tuple[str, ...], int], path: str) -> int:
    place = tuple(PARTS.findall(path))
    return next(known[place[:end]] for end in range(len(place), -1, -1) if place[:end] in known)


def _short(error: object) -> str:
    return wording.one_line(str(error), 300)


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys. YAML would keep only the last one.

    The loader also rejects aliases, because they can expand exponentially.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise self._error("aliases are not supported", event)
        if self._depth == _DEPTH_MAX:
            raise self._error(f"nested more than {_DEPTH_MAX} levels deep", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error("a key must be text", key)
            if key.value in seen:
                raise self._error(f"{key.value!r} is defined twice", key)
            seen.add(key.value)
        return node

    def _error(self, problem: str, at: Any) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, problem, at.start_mark)


# Only `true` and `false` are booleans, as in YAML 1.2: `yes` and `no` are answers to questions.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


class _Dumper(yaml.SafeDumper):
    """A YAML writer that formats multi-line strings as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
