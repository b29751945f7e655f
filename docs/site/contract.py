"""Reference pages of the gRPC services, from descriptors with comments."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from pawl.chassis.identity.roles import CALLERS, ROLES

_SCALARS: Final = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
_CODE: Final = re.compile(r"(`[^`]*`)")
_PAGE: Final = re.compile(r"docs/([\w/-]+\.md)")
_DOCS: Final = Path(__file__).parents[1]
_NAME: Final = re.compile(r"(?<![\w`])[A-Z](?:[A-Z]|\\_)+[A-Z](?![\w`])")
_REASONS: Final = "pawl.error.v1.ErrorReason"
_ERRORS: Final = "reference/errors.md"
_INDEX: Final = "reference/api/index.md"
_INDEX_PAGE: Final = """# gRPC API

Services and messages of Pawl, generated from the comments in `proto/`. Each method lists the
[error reasons](../errors.md) that it can return.

## Public services

{public}

## Shared types

{shared}

## Internal services

Only Pawl's own services call these.

{internal}
"""


@dataclass(kw_only=True)
class _Type:
    """A message or enum, and the page that describes it."""

    name: str
    proto: DescriptorProto | EnumDescriptorProto
    comments: Mapping[tuple[int, ...], str]
    path: tuple[int, ...]
    file: str
    services: set[str] = field(default_factory=set)
    page: str = ""

    @property
    def members(self) -> Iterator[tuple[Any, str]]:
        """The fields or values in order, each with its comment."""
        found = self.proto.value if isinstance(self.proto, EnumDescriptorProto) else self.proto.field
        for number, member in enumerate(found):
            yield member, self.comments.get((*self.path, 2, number), "")

    @property
    def title(self) -> str:
        """The name without its package."""
        return re.sub(r"^pawl\.\w+\.v1\.", "", self.name)


class Contract:
    """The services of Pawl, their messages and their comments."""

    def __init__(self, descriptors: FileDescriptorSet) -> None:
        self._files = [file for file in descriptors.file if file.package.startswith("pawl.")]
        self._comments = {file.name: _comments(file) for file in self._files}
        self.types: dict[str, _Type] = {}
        for file in self._files:
            for number, message in enumerate(file.message_type):
                self._add(file, f"{file.package}.{message.name}", message, (4, number))
            for number, enum in enumerate(file.enum_type):
                self._add(file, f"{file.package}.{enum.name}", enum, (5, number))
        self.reasons = dict(self._reasons())
        for file in self._files:
            for service in file.service:
                for name in self._reachable([method.input_type for method in service.method]):
                    self.types[name].services.add(f"{file.package}.{service.name}")
                for name in self._reachable([method.output_type for method in service.method]):
                    self.types[name].services.add(f"{file.package}.{service.name}")
        for each in self.types.values():
            package = each.name.split(".")[1]
            page = (
                service_page(next(iter(each.services)))
                if len(each.services) == 1
                else f"reference/api/{package}-types.md"
            )
            each.page = page

    def _add(
        self,
        file: FileDescriptorProto,
        name: str,
        proto: DescriptorProto | EnumDescriptorProto,
        path: tuple[int, ...],
    ) -> None:
        self.types[name] = _Type(name=name, proto=proto, comments=self._comments[file.name], path=path, file=file.name)
        if isinstance(proto, DescriptorProto):
            for number, message in enumerate(proto.nested_type):
                if not message.options.map_entry:
                    self._add(file, f"{name}.{message.name}", message, (*path, 3, number))
            for number, enum in enumerate(proto.enum_type):
                self._add(file, f"{name}.{enum.name}", enum, (*path, 4, number))

    def _reasons(self) -> Iterator[tuple[str, str]]:
        """Yield each error reason with its comment."""
        for value, comment in self.types[_REASONS].members:
            if value.number:
                yield value.name.removeprefix("ERROR_REASON_"), comment

    def _reachable(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = [name.removeprefix(".") for name in names]
        while waiting:
            name = waiting.pop()
            if name not in self.types or name in found:
                continue
            found.add(name)
            proto = self.types[name].proto
            if isinstance(proto, DescriptorProto):
                entries = [entry for entry in proto.nested_type if entry.options.map_entry]
                waiting += [
                    each.type_name[1:] for holder in (proto, *entries) for each in holder.field if each.type_name
                ]
        return found

    def pages(self) -> dict[str, str]:
        """Return a page for each service, one for the shared types of each package, and an index."""
        written: dict[str, str] = {}
        rows: dict[str, list[str]] = {"public": [], "shared": [], "internal": []}
        for file in self._files:
            for number, service in enumerate(file.service):
                name = f"{file.package}.{service.name}"
                page = service_page(name)
                written[page] = "\n".join(self._service(file, service, number, page))
                comment = " ".join(self._comments[file.name].get((6, number), "").split())
                summary = escaped(re.split(r"(?<=\.) (?=[A-Z])", comment)[0])
                callers = [CALLERS.get(f"/{name}/{method.name}", ROLES) for method in service.method]
                row = f"| [{service.name}]({relative(page, _INDEX)}) | `{file.package}` | {summary} |"
                rows["public" if any(each & ROLES for each in callers) else "internal"].append(row)
        shared: defaultdict[str, list[_Type]] = defaultdict(list)
        for each in self.types.values():
            if each.page not in written and each.name != _REASONS:
                shared[each.page].append(each)
        for page, types in shared.items():
            package = ".".join(types[0].name.split(".")[:3])
            head = f"# Types of {package}\n\nMessages and enums that more than one service uses.\n\n"
            written[page] = head + "\n".join(self._types(types, page))
            rows["shared"].append(f"| [Types of {package}]({relative(page, _INDEX)}) | `{package}` | |")
        tables = {
            kind: "| page | package | purpose |\n|---|---|---|\n" + "\n".join(sorted(rows[kind])) for kind in rows
        }
        return written | {_INDEX: _INDEX_PAGE.format(**tables)}

    def page_of_file(self, file: str) -> str:
        """Return the page that describes the first service of a file or, failing that, its first message."""
        (found,) = (each for each in self._files if each.name == file)
        if found.service:
            return service_page(f"{found.package}.{found.service[0].name}")
        first = next(each for each in self.types.values() if each.file == file)
        return _ERRORS if first.name == _REASONS else first.page

    def link(self, name: str, page: str) -> str:
        """Return a link from a page to a type, or its plain name if the type does not belong to Pawl."""
        each = self.types.get(name)
        if each is None:
            return f"`{name}`"
        target = "" if each.page == page else relative(each.page, page)
        return f"[{each.title}]({target}#{anchor(each.title)})"

    def _service(
        self, file: FileDescriptorProto, service: ServiceDescriptorProto, number: int, page: str
    ) -> Iterator[str]:
        comments = self._comments[file.name]
        yield f"# {service.name}\n"
        yield f"`{file.package}.{service.name}`, defined in `proto/{file.name}`.\n"
        yield self._prose(comments.get((6, number), ""), page)
        yield "## Methods\n"
        for index, method in enumerate(service.method):
            yield from self._method(
                method, f"{file.package}.{service.name}", comments.get((6, number, 2, index), ""), page
            )
        own = [each for each in self.types.values() if each.page == page]
        if own:
            yield "## Messages\n"
            yield from self._types(own, page)

    def _method(self, method: MethodDescriptorProto, service: str, comment: str, page: str) -> Iterator[str]:
        yield f"### {method.name}\n"
        takes, gives = (self.link(name.removeprefix("."), page) for name in (method.input_type, method.output_type))
        yield f"{'stream of ' * method.client_streaming}{takes} → {'stream of ' * method.server_streaming}{gives}\n"
        yield self._prose(comment, page)
        callers = CALLERS.get(f"/{service}/{method.name}", frozenset())
        if callers:
            yield f"Callers: {', '.join(f'`{caller}`' for caller in sorted(callers))}.\n"

    def _types(self, types: Iterable[_Type], page: str) -> Iterator[str]:
        for each in sorted(types, key=lambda each: each.title):
            yield f"### {each.title} {{#{anchor(each.title)}}}\n"
            yield self._prose(each.comments.get(each.path, ""), page)
            rows = list(self._rows(each, page))
            if rows:
                kind = "field | type" if isinstance(each.proto, DescriptorProto) else "value | number"
                yield f"| {kind} | description |\n|---|---|---|"
                yield "\n".join(rows) + "\n"

    def _rows(self, each: _Type, page: str) -> Iterator[str]:
        for member, comment in each.members:
            text = self._cell(comment, page)
            if isinstance(each.proto, EnumDescriptorProto):
                yield f"| `{member.name}` | {member.number} | {text} |"
                continue
            if member.HasField("oneof_index") and not member.proto3_optional:
                text = f"One of `{each.proto.oneof_decl[member.oneof_index].name}`. {text}"
            yield f"| `{member.name}` | {self._type_of(member, each.proto, page)} | {text} |"

    def _type_of(self, member: FieldDescriptorProto, owner: DescriptorProto, page: str) -> str:
        kind = self.link(member.type_name[1:], page) if member.type_name else _SCALARS[member.type]
        for entry in owner.nested_type:
            if entry.options.map_entry and member.type_name.endswith(f".{owner.name}.{entry.name}"):
                key, value = entry.field
                return f"map of {_SCALARS[key.type]} to {self._type_of(value, entry, page)}"
        if member.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        return f"optional {kind}" if member.proto3_optional else kind

    def _prose(self, comment: str, page: str) -> str:
        """Return a comment as paragraphs and lists."""
        blocks: list[str] = []
        for paragraph in comment.split("\n\n"):
            text, *items = re.split(r"(?:^|\n)- ", paragraph)
            found = [self._linked(escaped(" ".join(each.split())), page) for each in (text, *items)]
            blocks += [found[0]] if found[0] else []
            blocks += ["\n".join(f"- {each}" for each in found[1:])] if items else []
        return "\n\n".join(blocks).replace("Errors:", "**Errors:**") + "\n"

    def _cell(self, comment: str, page: str) -> str:
        return "<br>".join(
            self._linked(escaped(" ".join(each.split())), page).replace("|", "\\|")
            for each in comment.strip().split("\n\n")
        )

    def _linked(self, text: str, page: str) -> str:
        """Return a text with links for error reasons and pages of docs/."""

        def replaced(match: re.Match[str]) -> str:
            name = match[0].replace("\\", "")
            return f"[{name}]({relative(_ERRORS, page)}#{anchor(name)})" if name in self.reasons else match[0]

        return linked_pages(_NAME.sub(replaced, text), page)


def linked_pages(text: str, page: str) -> str:
    """Return a text in which paths of pages, such as docs/reference/nats.md, are links with the page's title."""

    def replaced(match: re.Match[str]) -> str:
        title = (_DOCS / match[1]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{title}]({relative(match[1], page)})"

    return _PAGE.sub(replaced, text)


def service_page(name: str) -> str:
    """Return the page of a service."""
    return f"reference/api/{re.sub(r'(?<=[a-z])(?=[A-Z])', '-', name.rpartition('.')[2]).lower()}.md"


def relative(target: str, page: str) -> str:
    """Return the link from a page to another one."""
    ups = page.count("/")
    same = 0
    ours, theirs = page.split("/")[:-1], target.split("/")[:-1]
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    return "../" * (ups - same) + "/".join(target.split("/")[same:])


def anchor(title: str) -> str:
    """Return the id of the heading of a type or an error reason."""
    return title.lower().replace(".", "-")


def escaped(text: str) -> str:
    """Return a text with Markdown and HTML escaped outside of code."""
    return "".join(
        part if part.startswith("`") and part.endswith("`") and len(part) > 1 else re.sub(r"([*_<\[\]])", r"\\\1", part)
        for part in _CODE.split(text)
    )


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        tuple(location.path): "\n".join(line.removeprefix(" ") for line in location.leading_comments.splitlines())
        for location in file.source_code_info.location
        if location.leading_comments
    }
