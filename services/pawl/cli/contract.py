"""Commands built from the proto files. The request defines the options, and the response defines the output."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, confirm, labels_of, say, seconds_of, show_table, time_of
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient, StartError
from pawl.client.target import Service
from pawl.comments.fields import COMMENTS
from pawl.errors import PawlError

# Each service's stub in AsyncClient, and its addresses.
_STUBS: Final[Mapping[str, tuple[str, Service]]] = {
    "pawl.agent.v1.AgentService": ("agents", "agent"),
    "pawl.agent.v1.AgentRegistryService": ("agent_register", "agent"),
    "pawl.agent.v1.ConversationService": ("conversations", "agent"),
    "pawl.agent.v1.DeclarationService": ("declarations", "agent"),
    "pawl.agent.v1.GoalService": ("goals", "agent"),
    "pawl.agent.v1.JobService": ("jobs", "agent"),
    "pawl.agent.v1.OperatorService": ("operators", "agent"),
    "pawl.agent.v1.ScheduleService": ("scheduler", "agent"),
    "pawl.agent.v1.TriggerService": ("triggers", "agent"),
    "pawl.agent.v1.UsageService": ("usage_register", "agent"),
    "pawl.agent.v1.WorkflowService": ("workflows", "agent"),
    "pawl.tool.v1.AuditService": ("auditor", "tools"),
    "pawl.tool.v1.DocumentService": ("document_store", "tools"),
    "pawl.tool.v1.FileService": ("files", "tools"),
    "pawl.tool.v1.MemoryService": ("memories", "tools"),
    "pawl.tool.v1.RuleService": ("rules", "tools"),
    "pawl.tool.v1.SourceService": ("sources", "tools"),
    "pawl.tool.v1.ToolService": ("tool_register", "tools"),
    "pawl.notify.v1.ChannelService": ("notify_channels", "notifications"),
    "pawl.notify.v1.PreferenceService": ("preferences", "notifications"),
    "pawl.identity.v1.KeyService": ("key_register", "keys"),
    "pawl.settings.v1.SettingsService": ("settings", "keys"),
}
_pool: Final = descriptor_pool.Default()
# Requests that change or delete resources that files can declare.
_CHANGE: Final = re.compile(
    r"(?:Add|Update|Delete|Remove|Revoke)(Agent|Channel|Rule|Schedule|Settings|Source|Trigger|Workflow)Request"
)
# Terminals of this width also show conversation ids.
_WIDE: Final = 120
# Deadline for calls about tool sources, which can be slow to start.
_SOURCE_SECONDS: Final = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A parameter that fills the field at `path` of a request.

    `help` replaces the field's comment. `put` sets the value where the field's type does not determine how. An option
    with a `constant` is a switch that sets the field to that value. `excludes` names an earlier option that cannot be
    combined with this one.
    """

    path: str
    help: str = ""
    is_optional: bool = False
    constant: Any = None
    put: Callable[[Any, Any], None] | None = None
    excludes: str = ""


# A command's options, keyed by what users type: `--every -e`, or `name` for an argument.
Options: TypeAlias = Mapping[str, Option | str]
Output: TypeAlias = Callable[[Any, Any], str | Sequence[str]] | str
# A list's columns by heading: a field path, or a function of an item.
Columns: TypeAlias = Mapping[str, Callable[[Any], str] | str]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print protobuf JSON, one message per line.")]

_TARGET: Final = inspect.Parameter("target", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=AsyncClient)
_CONSOLE: Final = inspect.Parameter("console", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Console)


def choices(kind: EnumDescriptor) -> Any:
    """Return an enum's values as users type them: `needs-attention` for RUN_STATE_NEEDS_ATTENTION."""
    names = [wording.short_name(kind, value.number).replace("_", "-") for value in kind.values if value.number]
    return StrEnum(kind.name, {name: name for name in names})


def number_of(kind: EnumDescriptor, typed: str) -> int:
    names = {wording.short_name(kind, value.number).replace("_", "-"): value.number for value in kind.values}
    return names[typed]


def verb(
    request: Message,
    options: Options,
    help: str,  # noqa: A002  # as typer has it
    output: Output,
    *,
    confirmation: Callable[[Any], str] | str = "",
    narrows: bool = False,
    needs: Sequence[str] = (),
    before: Callable[[AsyncClient, Any], Awaitable[None]] | None = None,
    succeeded: Callable[[Any], bool] = lambda _: True,
) -> Callable[..., None]:
    """Build a command that sends a request and prints the outcome.

    `output` is a sentence that may contain request fields, or a function that returns lines. If the response has a
    secret, only the secret goes to standard output. `confirmation` is a question to ask first. `narrows` refuses an
    empty value, which would include all items. At least one of the options in `needs` is required. `before` prepares a
    request before the options are applied to it. The exit code is 0 if `succeeded` returns true for the response, and 1
    otherwise.
    """

    async def work(target: AsyncClient, console: Console, *, json: bool, **given: Any) -> int:
        requested = copy.deepcopy(request)
        named = _named(request.DESCRIPTOR, options)
        if needs and not any(given[name] for name, typed, *_ in named if typed in needs):
            shown = (each if each.startswith("-") else each.upper() for each in needs)
            raise CommandError(f"Specify {' or '.join(shown)}.")
        fill(requested, options, given, narrows=narrows)
        if before:
            await before(target, requested)
            fill(requested, options, given)
        question = confirmation(requested) if callable(confirmation) else _sentence(confirmation, requested)
        if confirmation and not confirm(question, yes=given["yes"]):
            return EXIT_UNSUCCESSFUL
        answer = await ask(target, requested)
        await warn_of_set(target, requested, answer)
        lines = _sentence(output, requested) if isinstance(output, str) else output(answer, requested)
        secret = getattr(answer, "secret", "")
        if json:
            print(json_line(answer))
        elif secret:
            say(Console(stderr=True, highlight=False), lines)
            say(console, secret)
        else:
            say(console, lines, "green" if isinstance(output, str) else "")
        return 0 if succeeded(answer) else EXIT_UNSUCCESSFUL

    flags = [_flag("yes", Yes)] if confirmation else []
    return _build(work, request, help, [*parameters(request.DESCRIPTOR, options), *flags, _flag("json", Json)])


def listing(
    request: Message,
    options: Options,
    help: str,  # noqa: A002  # as typer has it
    columns: Columns | Callable[[Any], Columns],
    *,
    none: str,
    count: int = 0,
    newest_last: bool = False,
    footer: Callable[[AsyncClient, Any], Awaitable[str]] | None = None,
) -> Callable[..., None]:
    """Build a command that lists items in columns.

    The command lists all pages. With `count`, the user can limit the number of items. If there are no items, `none` is
    printed to standard error. The columns may depend on the request. `footer` returns a final line, which JSON output
    omits.
    """

    async def work(target: AsyncClient, console: Console, *, json: bool, **given: Any) -> None:
        requested = copy.deepcopy(request)
        fill(requested, options, given, narrows=True)
        found = await items(target, requested, given.get("count") or 0)
        shown = columns(requested) if callable(columns) else columns
        show_items(console, found[::-1] if newest_last else found, shown, none=none, json=json)
        if footer and not json:
            say(console, await footer(target, requested))

    many = Annotated[int, typer.Option("--count", "-n", help="Maximum number of items to list.", min=1)]
    flags = (
        [inspect.Parameter("count", inspect.Parameter.KEYWORD_ONLY, default=count, annotation=many)] if count else []
    )
    return _build(work, request, help, [*parameters(request.DESCRIPTOR, options), *flags, _flag("json", Json)])


def show_items(console: Console, found: Sequence[Any], columns: Columns, *, none: str, json: bool = False) -> None:
    if not found and not json:
        say(Console(stderr=True, highlight=False), none)
    elif json:
        for item in found:
            print(json_line(item))
    else:
        if console.is_terminal and console.width < _WIDE:
            first, *_ = columns
            columns = {name: cell for name, cell in columns.items() if name == first or name != "conversation"}
        cells = columns.values()
        rows = [
            [wording.text_at(item, cell) if isinstance(cell, str) else cell(item) for cell in cells] for item in found
        ]
        show_table(console, list(columns), rows)


async def items(target: AsyncClient, request: Any, count: int = 0) -> list[Any]:
    """List the items of all pages. Unless `count` is 0, list at most that many.

    The items are a page's first repeated field.
    """
    found: list[Any] = []
    if "page_size" not in request.DESCRIPTOR.fields_by_name:
        return _items_of(await ask(target, request))
    async for page in target.pages(_method(target, request), request):
        found += _items_of(page)
        if count and len(found) >= count:
            break
    return found[: count or None]


async def ask(target: AsyncClient, request: Any) -> Any:
    """Send a request to its method. If the request has a request_id, repeating it has no further effect."""
    method = _method(target, request)
    if _where(request)[0] == "sources":
        method = functools.partial(method, timeout=_SOURCE_SECONDS)
    return await (target.once if "request_id" in request.DESCRIPTOR.fields_by_name else target.again)(method, request)


async def warn_of_set(target: AsyncClient, request: Any, answer: Any) -> None:
    """Print a warning if a request has changed or deleted a resource that belongs to a set of files."""
    if (found := _CHANGE.fullmatch(request.DESCRIPTOR.name)) is None:
        return
    from pawl.agent.v1 import declaration_pb2  # noqa: PLC0415  # few commands need it

    kind = found[1].lower()
    resource = getattr(answer, kind, request)
    parts = (request, getattr(request, "definition", None), getattr(request, "config", None), resource)
    name = next(filter(None, (getattr(part, "name", "") for part in parts)), getattr(resource, "rule_id", ""))
    if kind == "settings":
        name = wording.short_name(resource.DESCRIPTOR.fields_by_name["layer"].enum_type, resource.layer)
    with suppress(PawlError, StartError):  # The change itself has succeeded.
        for each in await items(target, declaration_pb2.ListDeclarationsRequest()):
            if (each.kind, each.name) == (kind, name):
                owned = f"warning: the {kind} {name!r} belongs to the set {each.set!r}"
                text = f"{owned}; the next `pawl apply` of this set restores it"
                say(Console(stderr=True, highlight=False), wording.clean(text))


def shown(answer: Any, _request: Any) -> list[str]:
    return wording.described(getattr(answer, answer.DESCRIPTOR.fields[0].name))


def json_line(message: Message) -> str:
    return MessageToJson(message, preserving_proto_field_name=True, indent=None)


def parameters(kind: Any, options: Options) -> list[inspect.Parameter]:
    """Return the command parameters that fill a message. Their help comes from the proto comments."""
    return [_parameter(*each) for each in _named(kind, options)]


def fill(message: Any, options: Options, given: Mapping[str, Any], *, narrows: bool = False) -> None:
    """Fill a message with the given options.

    Raises:
        CommandError: A value is out of range, two options exclude each other, or, with `narrows`, a value is empty
            (which would include all items).
    """
    chosen: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    for name, typed, option, field in _named(message.DESCRIPTOR, options):
        value = given[name]
        if value is None or value == [] or (option.constant is not None and not value):
            continue
        if narrows and value == "":
            raise CommandError("the value must not be empty. Omit the option to include all.", parameter=name)
        if option.excludes in seen:
            raise CommandError(f"{typed} cannot be combined with {option.excludes}.")
        seen |= {typed} if value != "" else set()
        *parents, _ = option.path.split(".")
        inside = message
        for part in parents:
            oneof = inside.DESCRIPTOR.fields_by_name[part].containing_oneof
            member, first = chosen.setdefault(oneof.full_name, (part, typed)) if oneof else (part, typed)
            if member != part:
                raise CommandError(f"{typed} cannot be combined with {first}.")
            inside = getattr(inside, part)
            inside.SetInParent()
        try:
            if option.put:
                option.put(inside, value)
            else:
                _put(inside, field, value if option.constant is None else option.constant)
        except UnicodeEncodeError:
            raise
        except ValueError:  # Raised by protobuf.
            raise CommandError(f"{value} is out of range.", parameter=name) from None


def _put(message: Any, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).clear()
        getattr(message, field.name).update(labels_of(list(filter(None, value)), field.name))
    elif field.is_repeated:
        getattr(message, field.name)[:] = [_value(field, each) for each in value if each]
    elif value == "" and field.message_type is not None:
        message.ClearField(field.name)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(time_of(value, field.name))
    else:
        setattr(message, field.name, _value(field, value))


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        return number_of(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return value.encode()
    if isinstance(value, str) and field.type != FieldDescriptor.TYPE_STRING:
        return seconds_of(value or "0s", field.name)
    return value


def _named(kind: Any, options: Options) -> Iterator[tuple[str, str, Option, FieldDescriptor]]:
    """For each option, yield its parameter name, its name as users type it, the option itself and its field."""
    taken = set[str]()
    for typed, each in options.items():
        option = Option(path=each) if isinstance(each, str) else each
        field = field_at(kind, option.path)
        name = typed.split()[0].strip("-").replace("-", "_") if field.name in taken else field.name
        taken.add(name)
        yield name, typed, option, field


def field_at(kind: Any, path: str) -> Any:
    *parents, last = path.split(".")
    for parent in parents:
        kind = kind.fields_by_name[parent].message_type
    return kind.fields_by_name[last]


def _parameter(name: str, typed: str, option: Option, field: FieldDescriptor) -> inspect.Parameter:
    text = option.help or COMMENTS.get(field.full_name, "")
    kind: Any = _type_of(field, option)
    bounds: dict[str, Any] = {"min": 0} if kind is int else {}
    if typed.startswith("-"):
        metavar = _metavar(field, option)
        info, default = typer.Option(*typed.split(), help=text, metavar=metavar, show_default=False, **bounds), None
    else:
        info = typer.Argument(metavar=typed.upper(), help=text, show_default=False, **bounds)
        default = None if option.is_optional else inspect.Parameter.empty
    several = field.is_repeated and option.constant is None
    annotation: Any = Annotated[(list[kind] if several else kind) | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _type_of(field: FieldDescriptor, option: Option) -> Any:
    if option.constant is not None or field.type == FieldDescriptor.TYPE_BOOL:
        return bool
    if field.enum_type is not None and option.put is None:
        return choices(field.enum_type)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return float
    is_text = field.cpp_type in {FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE}
    return str if is_text or option.put or field.name.endswith("_seconds") else int


def _metavar(field: FieldDescriptor, option: Option) -> str | None:
    if _type_of(field, option) is not str:
        return None
    if field.message_type is not None and not option.put:
        return "KEY=VALUE" if field.message_type.GetOptions().map_entry else "2026-01-31T09:00"
    return "30s|15m|2h|7d" if field.cpp_type != FieldDescriptor.CPPTYPE_STRING and not option.put else "TEXT"


def _flag(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _build(
    work: Callable[..., Awaitable[int | None]], request: Message, text: str, taken: list[inspect.Parameter]
) -> Callable[..., None]:
    vars(work)["__signature__"] = inspect.Signature([_TARGET, _CONSOLE, *taken])
    work.__doc__ = text
    return command(service=_where(request)[1])(work)


def _where(request: Any) -> tuple[str, Service]:
    """Return the stub and the addresses of the service that handles a request."""
    for service, where in _STUBS.items():
        with suppress(KeyError):  # Services whose modules are not imported are unknown.
            if request.DESCRIPTOR in (each.input_type for each in _pool.FindServiceByName(service).methods):
                return where
    raise LookupError(request.DESCRIPTOR.full_name)


def _method(target: AsyncClient, request: Any) -> Any:
    return getattr(getattr(target, _where(request)[0]), request.DESCRIPTOR.name.removesuffix("Request"))


def _items_of(page: Any) -> list[Any]:
    return list(getattr(page, next(field.name for field in page.DESCRIPTOR.fields if field.is_repeated)))


def _sentence(text: str, request: Any) -> str:
    """Insert fields of a request into a sentence: `Deleted {name}.`."""
    fields = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
    return text.format_map({name: wording.one_line(str(value), 200) for name, value in fields.items()})
