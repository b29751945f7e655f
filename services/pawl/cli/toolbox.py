"""Implements `pawl tools`, `sources`, `documents`, `memory` and `complete`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, json_of, labels_of, read_file, reading, say, secret_of
from pawl.cli.contract import Columns, Option, Options, ask, choices, listing, number_of, verb
from pawl.cli.failure import CommandError
from pawl.cli.jobs import put_reports
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, document_pb2, memory_pb2, source_pb2, tool_pb2

_TOOL: Final[Columns] = {
    "tool": "definition.name",
    "version": "version",
    "runs in": "definition.context",
    "category": "definition.category",
    "effect": "definition.effect_class",
    "description": lambda tool: wording.one_line(tool.definition.description, 80),
}
_FIGURES: Final[Columns] = {
    "tool": "tool_name",
    "agent": "agent_name",
    "runs": "execution_count",
    "errors": "error_count",
    "cached": "cached_count",
    "p50": lambda figures: f"{figures.p50_seconds:.3g} s",
    "p95": lambda figures: f"{figures.p95_seconds:.3g} s",
    "bytes": "result_bytes",
    "asked": "approval_asked_count",
    "approved": "approved_count",
    "edited": "edited_count",
    "rejected": "rejected_count",
}

tools: Final = listing(
    tool_pb2.ListToolsRequest(), {}, "List the tools available to models.", _TOOL, none="There are no tools."
)
stats: Final = listing(
    audit_pb2.GetToolAnalyticsRequest(),
    {
        "tool": Option(path="tool_name", help="Only this tool.", is_optional=True),
        "--agent": "agent_name",
        "--by-agent": "by_agent",
        "--since": "since_time",
        "--before": "before_time",
    },
    "Show statistics by tool. Counts calls, errors, latency, bytes and approvals. Requires the operator or admin role.",
    _FIGURES,
    none="No tool has been called.",
)

# Sources.

_NAMES: Final[Sequence[Any]] = (call_pb2.ToolCategory.DESCRIPTOR, call_pb2.EffectClass.DESCRIPTOR)
_WORDS: Final = {
    name.replace("-", "_"): (field, number_of(kind, name))
    for field, kind in zip(("category", "effect_class"), _NAMES, strict=True)
    for name in choices(kind)
}
_SWITCHES: Final = ("excluded", "without_background", "permits_grants")
_VALUES: Final = ("bulk", "timeout_seconds", "async_timeout_seconds", "reports")
POLICY: Final = (
    f"TOOL=WORDS: {', '.join((*_WORDS, *_SWITCHES))}, bulk=$.body.items, timeout_seconds=30,"
    " async_timeout_seconds=7200 or reports=end (see pawl jobs start), separated by commas; TOOL may be *."
    " Repeatable."
)


def policy_of(given: str) -> source_pb2.SourceToolPolicy:
    """Parse a policy `TOOL=WORD,WORD`.

    Raises:
        CommandError: The policy is invalid or empty.
    """
    name, _, words = given.partition("=")
    policy = source_pb2.SourceToolPolicy(tool_name=name)
    for word in filter(None, map(str.strip, words.split(","))):
        try:
            _add_word(policy, *word.partition("=")[::2], has_value="=" in word)
        except ValueError as error:
            raise CommandError(f"--policy {given!r}: {word!r} {error}.") from None
    if not name or policy == source_pb2.SourceToolPolicy(tool_name=name):
        raise CommandError(f"--policy {given!r} must be of the form TOOL=WORD,WORD.")
    return policy


def _add_word(policy: source_pb2.SourceToolPolicy, word: str, value: str, *, has_value: bool) -> None:
    word = word.lower()
    if word not in (_VALUES if has_value else (*_WORDS, *_SWITCHES)):
        raise ValueError(f"must be one of {', '.join((*_WORDS, *_SWITCHES, *(f'{each}=...' for each in _VALUES)))}")
    if word == "reports":
        put_reports(policy.reports, value, "reports")
    elif word == "bulk":
        policy.bulk_count = value
    elif has_value:
        setattr(policy, word, _seconds(value))
    else:
        setattr(policy, *_WORDS.get(word, (word, True)))


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number of seconds") from None


def _stateless(config: source_pb2.SourceConfig, _typed: str) -> None:
    getattr(config, config.WhichOneof("kind") or "mcp_stdio").stateless = True


def _headers(field: str) -> Callable[[source_pb2.SourceConfig, list[str]], None]:
    def put(config: source_pb2.SourceConfig, typed: list[str]) -> None:
        kind = getattr(config, config.WhichOneof("kind") or "open_api")
        getattr(kind, field).update(labels_of(typed, field.removesuffix("s")))

    return put


def _absolute(typed: list[str]) -> list[str]:
    return [str(Path(each).absolute()) for each in typed]


def _openapi(config: source_pb2.OpenApiConfig, typed: str) -> None:
    if typed.startswith(("http://", "https://")):
        config.document_url = typed
    else:
        config.document = read_file(Path(typed))


def _schema(config: source_pb2.HttpEndpointConfig, typed: str) -> None:
    config.arguments_schema_json = read_file(Path(typed[1:])) if typed.startswith("@") else typed.encode()


_LAST: Final[Options] = {
    "--header": Option(
        path="config.policies", help="A header for every request, as name=value. Repeatable.", put=_headers("headers")
    ),
    "--secret-header": Option(
        path="config.policies",
        help="A header whose value is one of the registry's secrets, as name=secret. Repeatable.",
        put=_headers("secret_headers"),
    ),
    "--policy": Option(
        path="config.policies", help=POLICY, put=lambda config, typed: config.policies.extend(map(policy_of, typed))
    ),
    "--replace": "replace",
}
_PROGRAM: Final = "config.mcp_stdio"
_MCP: Final[Options] = {
    "name": "config.name",
    "command": Option(
        path=f"{_PROGRAM}.command", help="The command that starts the server, after `--`.", is_optional=True
    ),
    "--url": "config.mcp_http.url",
    "--env": f"{_PROGRAM}.environment",
    "--secret-env": f"{_PROGRAM}.secret_environment",
    "--read": Option(
        path=f"{_PROGRAM}.readable_paths", put=lambda program, typed: program.readable_paths.extend(_absolute(typed))
    ),
    "--write": Option(
        path=f"{_PROGRAM}.writable_paths", put=lambda program, typed: program.writable_paths.extend(_absolute(typed))
    ),
    "--memory": f"{_PROGRAM}.memory_bytes_max",
    "--processes": f"{_PROGRAM}.processes_max",
    "--stateless": Option(
        path="config.name",
        help="It keeps no state between calls, so all users can share a session.",
        constant=True,
        put=_stateless,
    ),
    **_LAST,
    "--header": "config.mcp_http.headers",
    "--secret-header": "config.mcp_http.secret_headers",
}
_HTTP: Final[Options] = {
    "name": "config.name",
    "--openapi": Option(path="config.open_api.document_url", help="OpenAPI document: a file or URL.", put=_openapi),
    "--base-url": "config.open_api.base_url",
    "--operation": "config.open_api.operation_ids",
    "--endpoint": "config.http_endpoint.url",
    "--method": "config.http_endpoint.method",
    "--description": "config.http_endpoint.description",
    "--arguments": Option(
        path="config.http_endpoint.arguments_schema_json",
        help="JSON Schema of the endpoint's arguments, or @FILE.",
        put=_schema,
    ),
    "--idempotency-header": "config.http_endpoint.idempotency_header",
    **_LAST,
}


def _where(source: source_pb2.Source) -> str:
    kind = source.config.WhichOneof("kind") or "http_endpoint"
    config = getattr(source.config, kind)
    if kind == "mcp_stdio":
        return wording.one_line(" ".join(config.command), 60)
    if kind == "open_api":
        return wording.one_line(config.base_url or config.document_url or "an OpenAPI document", 60)
    return wording.one_line(config.url, 60)


def _tool_line(tool: tool_pb2.Tool) -> str:
    category, effect = (wording.text_at(tool, f"definition.{field}") for field in ("category", "effect_class"))
    description = wording.one_line(tool.definition.description, 80)
    return f"{wording.clean(tool.definition.name)} version {tool.version}: {category}, {effect}. {description}"


def _left_out(tools: Sequence[source_pb2.LeftOutTool]) -> list[str]:
    return [wording.clean(f"{tool.name} was skipped: {tool.reason}.") for tool in tools]


def _added(answer: Any, _: Any) -> list[str]:
    return [*map(_tool_line, answer.source.tools), *_left_out(getattr(answer, "left_out", ()))]


sources = typer.Typer(
    help="Manage tool sources: MCP servers and HTTP APIs.", no_args_is_help=True, rich_markup_mode=None
)
sources.command("list")(
    listing(
        source_pb2.ListSourcesRequest(),
        {},
        "List the sources with their state at the last check.",
        {
            "source": "config.name",
            "state": "state",
            "tools": lambda source: str(len(source.tools)),
            "where": _where,
            "problem": "problem",
        },
        none="There are no sources.",
    )
)
sources.command("add-mcp")(
    verb(
        source_pb2.AddSourceRequest(),
        _MCP,
        "Add an MCP server. Specify a command on the registry's machine, or a URL.",
        _added,
        needs=("command", "--url"),
    )
)
sources.command("add-http")(
    verb(
        source_pb2.AddSourceRequest(),
        _HTTP,
        "Add an HTTP service. Each operation of its OpenAPI document, or one endpoint, becomes a tool.",
        _added,
        needs=("--openapi", "--endpoint"),
    )
)
sources.command("approve")(
    verb(
        source_pb2.ApproveSourceRequest(),
        {"name": "name", "hash": Option(path="definitions_hash", help="The hash printed by `pawl sources check`.")},
        "Approve a source's current tool definitions.",
        _added,
    )
)
sources.command("remove")(
    verb(
        source_pb2.RemoveSourceRequest(),
        {"name": "name"},
        "Remove a source and its tools.",
        "Removed {name} and its tools.",
    )
)


@sources.command()
@command(service="tools")
async def check(
    target: AsyncClient,
    console: Console,
    name: Annotated[str, typer.Argument(help="Name of the source.", show_default=False)],
) -> int:
    """Check a source for changed tools.

    Shows how its tools differ from the approved ones.
    """
    checked = await ask(target, source_pb2.CheckSourceRequest(name=name))
    lines = [f"{name} is {wording.text_at(checked.source, 'state')}. {checked.source.problem}".rstrip()]
    lines += [line for change in checked.changes for line in _change_lines(change)]
    lines += _left_out(checked.left_out)
    if checked.changes:
        lines.append(f"Approve with: pawl sources approve {name} {checked.found_hash}")
    say(console, map(wording.clean, lines))
    return 0 if checked.source.state == source_pb2.SOURCE_STATE_READY else EXIT_UNSUCCESSFUL


def _change_lines(change: source_pb2.SourceChange) -> Iterator[str]:
    if not change.HasField("found"):
        yield f"- {change.tool_name} was removed"
    elif not change.HasField("approved"):
        yield f"+ {change.tool_name} is new: {change.found.description}"
        yield f"  arguments: {change.found.arguments_schema_json.decode()}"
    else:
        yield f"* {change.tool_name} has changed"
        if change.approved == change.found:
            yield "  outside its definition: title, results or annotations"
        for field in change.found.DESCRIPTOR.fields_by_name:
            before, after = getattr(change.approved, field), getattr(change.found, field)
            if before != after:
                yield f"  {field} was {_plain(before)}"
                yield f"  {field} is  {_plain(after)}"


def _plain(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# Documents.

documents = typer.Typer(help="List, add and remove the documents that the model can read.", no_args_is_help=True)
documents.command("list")(
    listing(
        document_pb2.ListDocumentsRequest(),
        {},
        "List your documents and the store's shared documents.",
        {
            "owner": lambda each: "store" if each.owner == document_pb2.DOCUMENT_OWNER_STORE else "you",
            "bytes": "text_bytes",
            "language": "language",
            "changed": "update_time",
            "name": "name",
        },
        none="There are no documents. Add one with `pawl documents add FILE`.",
    )
)
documents.command("remove")(
    verb(
        document_pb2.DeleteDocumentRequest(owner=document_pb2.DOCUMENT_OWNER_USER),
        {
            "name": "name",
            "--shared": Option(
                path="owner",
                help="Remove one of the store's shared documents.",
                constant=document_pb2.DOCUMENT_OWNER_STORE,
            ),
        },
        "Remove a document.",
        "Removed {name}.",
    )
)


@documents.command()
@command(service="tools")
async def add(
    target: AsyncClient,
    console: Console,
    file: Annotated[Path, typer.Argument(help="A UTF-8 text file, at most 1 MiB.")],
    *,
    name: Annotated[str, typer.Option(help="Name of the document. Default: the file name.")] = "",
    language: Annotated[
        str, typer.Option(help="Language of the full-text search: simple, english, german and so on.")
    ] = "",
    shared: Annotated[bool, typer.Option("--shared", help="Share it with all users of the store.")] = False,
) -> None:
    """Add a document, or replace the one with the same name."""
    with reading(file):
        put = await target.upload(file, name=name, language=language, shared=shared)
    say(console, f"{'Added' if put.created else 'Replaced'} {wording.one_line(put.document.name)}.")


# Memory.


def _sure(request: memory_pb2.EraseMemoriesRequest) -> str:
    what = f"the memory {request.memory_id}" if request.memory_id else "everything"
    whose = f"the agent {request.agent_name} remembers" if request.agent_name else "agents remember"
    return f"Erase {what} that {whose} about you?"


def _erased(answer: Any, request: Any) -> str:
    if request.memory_id and not answer.erased_count:
        raise CommandError(f"No memory has the id {request.memory_id}. List your memories with `pawl memory list`.")
    return f"Erased {answer.erased_count} {'memory' if answer.erased_count == 1 else 'memories'}."


memory = typer.Typer(help="List and erase what agents remember about you.", no_args_is_help=True)
memory.command("list")(
    listing(
        memory_pb2.ListMemoriesRequest(),
        {"--agent": "agent_name"},
        "List what agents remember about you, oldest first.",
        {"agent": "agent_name", "remembered": "create_time", "id": "memory_id", "text": "text"},
        none="Agents do not remember anything about you.",
    )
)
memory.command("erase")(
    verb(
        memory_pb2.EraseMemoriesRequest(),
        {"memory": Option(path="memory_id", is_optional=True), "--agent": "agent_name"},
        "Erase memories about you. Erases all, those of one agent, or a single one.",
        _erased,
        confirmation=_sure,
        narrows=True,
    )
)


_TOKEN: Final = (
    "The completion token from the tool. Use - for standard input or @FILE: other users can see command lines."  # noqa: S105
)


@command(service="tools")
async def complete(
    target: AsyncClient,
    console: Console,
    token: Annotated[str, typer.Argument(help=_TOKEN)],
    *,
    result: Annotated[str | None, typer.Option("--result", help="The result of the call, as JSON.")] = None,
    error: Annotated[str, typer.Option("--error", help="The error to report to the model.")] = "",
) -> None:
    """Complete a call that is waiting for an external result."""
    if (result is None) == (not error):
        raise CommandError("Specify --result JSON or --error TEXT.")
    value = None if result is None else json_of(result, "--result", "Put text in quotes.")
    known = await target.complete_call(secret_of(token), value, error=error)
    say(console, "The call was already completed with the same result." if known else "Completed.")
