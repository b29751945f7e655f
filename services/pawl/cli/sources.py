"""`pawl sources`: MCP servers and HTTP services that a store gets tools from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from pawl.cli import source_policies, wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, read_file
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import source_pb2, tool_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A source may take as long to start as the registry waits for it.
_SECONDS: Final = 90.0
_TIMEOUTS: Final = ("timeout_seconds", "async_timeout_seconds")

Name = Annotated[str, typer.Argument(help="Name of the source; its tools are NAME.TOOL.", show_default=False)]
Replace = Annotated[bool, typer.Option("--replace", help="Put it in place of a source of that name.")]
Policies = Annotated[list[str] | None, typer.Option("--policy", help=source_policies.HELP)]
Headers = Annotated[list[str] | None, typer.Option("--header", help="Name=value, of every request. Repeatable.")]
SecretHeaders = Annotated[
    list[str] | None, typer.Option("--secret-header", help="Name=name of a secret of the registry. Repeatable.")
]

app = typer.Typer(
    help="MCP servers and HTTP services that the store gets tools from.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
@command(asks="tools")
async def list_sources(target: AsyncClient, console: Console) -> None:
    """List the sources, as they were when they were last asked."""
    response = await target.sources.ListSources(source_pb2.ListSourcesRequest())
    rows = [
        (
            wording.clean(source.config.name),
            _state(source),
            str(len(source.tools)),
            wording.one_line(_where(source.config), 60),
            wording.one_line(source.problem, 120),
        )
        for source in response.sources
    ]
    show_table(console, ("source", "state", "tools", "where", "problem"), rows)


@app.command("add-mcp")
@command(asks="tools")
async def add_mcp(
    target: AsyncClient,
    console: Console,
    name: Name,
    command: Annotated[
        list[str] | None, typer.Argument(help="The program of the server, behind `--`.", show_default=False)
    ] = None,
    *,
    url: Annotated[str, typer.Option(help="Address of a server over streamable HTTP.", show_default=False)] = "",
    env: Annotated[list[str] | None, typer.Option(help="NAME=value, of its environment. Repeatable.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option(help="NAME=name of a secret of the registry. Repeatable.")
    ] = None,
    read: Annotated[
        list[Path] | None, typer.Option(help="Folder that it may read; no others then. Repeatable.")
    ] = None,
    write: Annotated[
        list[Path] | None, typer.Option(help="Folder that it may read and write; no others then. Repeatable.")
    ] = None,
    memory: Annotated[int, typer.Option(help="Bytes of memory that it may use; 0 means 1 GiB.", min=0)] = 0,
    processes: Annotated[int, typer.Option(help="Processes that it may be; 0 means 64.", min=0, max=1000)] = 0,
    stateless: Annotated[
        bool, typer.Option("--stateless", help="It keeps nothing between calls: all users may share one session.")
    ] = False,
    header: Headers = None,
    secret_header: SecretHeaders = None,
    policy: Policies = None,
    replace: Replace = False,
) -> None:
    """Add an MCP server: a program of the registry's machine, or one over HTTP."""
    config = source_pb2.SourceConfig(name=name)
    if bool(url) == bool(command):
        raise CommandError("Give either a program, behind `--`, or --url.")
    if url and (env or secret_env or read or write or memory or processes):
        raise CommandError("--env, --secret-env, --read, --write, --memory and --processes are for programs.")
    if command and (header or secret_header):
        raise CommandError("--header and --secret-header go with --url.")
    if url:
        config.mcp_http.url, config.mcp_http.stateless = url, stateless
        config.mcp_http.headers.update(_pairs("--header", header))
        config.mcp_http.secret_headers.update(_pairs("--secret-header", secret_header))
    else:
        stdio = config.mcp_stdio
        stdio.command.extend(command or ())
        stdio.environment.update(_pairs("--env", env))
        stdio.secret_environment.update(_pairs("--secret-env", secret_env))
        stdio.readable_paths.extend(str(path.absolute()) for path in read or ())
        stdio.writable_paths.extend(str(path.absolute()) for path in write or ())
        stdio.memory_bytes_max, stdio.processes_max, stdio.stateless = memory, processes, stateless
    await _add(target, console, config, policy, replace=replace)


@app.command("add-http")
@command(asks="tools")
async def add_http(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    openapi: Annotated[str, typer.Option(help="OpenAPI document: a file, or its address.", show_default=False)] = "",
    base_url: Annotated[str, typer.Option(help="Address of the service, if not the document's.")] = "",
    operation: Annotated[list[str] | None, typer.Option(help="Id of an operation to take. Repeatable.")] = None,
    endpoint: Annotated[
        str, typer.Option(help="One address in place of a document; {argument} in path or query.", show_default=False)
    ] = "",
    method: Annotated[str, typer.Option(help="Of the endpoint: GET, POST, PUT, PATCH or DELETE.")] = "",
    description: Annotated[str, typer.Option(help="What the endpoint does, for the model.")] = "",
    arguments: Annotated[str, typer.Option(help="Arguments of the endpoint: a JSON Schema, or @FILE with one.")] = "",
    idempotency_header: Annotated[
        str, typer.Option(help="Header of the endpoint for a key that is the same each time a call is made.")
    ] = "",
    header: Headers = None,
    secret_header: SecretHeaders = None,
    policy: Policies = None,
    replace: Replace = False,
) -> None:
    """Add an HTTP service: each operation of its OpenAPI document becomes a tool, or one endpoint does."""
    config = source_pb2.SourceConfig(name=name)
    if bool(openapi) == bool(endpoint):
        raise CommandError("Give either --openapi or --endpoint.")
    if endpoint and (base_url or operation):
        raise CommandError("--base-url and --operation go with --openapi.")
    if openapi and (method or description or arguments or idempotency_header):
        raise CommandError("--method, --description, --arguments and --idempotency-header go with --endpoint.")
    if openapi:
        _set_openapi(config.open_api, openapi)
        config.open_api.base_url = base_url
        config.open_api.operation_ids.extend(operation or ())
    else:
        config.http_endpoint.url, config.http_endpoint.method = endpoint, method
        config.http_endpoint.description = description
        config.http_endpoint.arguments_schema_json = _schema(arguments)
        config.http_endpoint.idempotency_header = idempotency_header
    kind = config.open_api if openapi else config.http_endpoint
    kind.headers.update(_pairs("--header", header))
    kind.secret_headers.update(_pairs("--secret-header", secret_header))
    await _add(target, console, config, policy, replace=replace)


def _set_openapi(config: source_pb2.OpenApiConfig, given: str) -> None:
    if given.startswith(("http://", "https://")):
        config.document_url = given
    else:
        config.document = read_file(Path(given))


def _schema(given: str) -> bytes:
    return read_file(Path(given[1:])) if given.startswith("@") else given.encode()


@app.command()
@command(asks="tools")
async def check(target: AsyncClient, console: Console, name: Name) -> int:
    """Ask a source for its tools, and show how they differ from what was approved."""
    request = source_pb2.CheckSourceRequest(name=name)
    checked = await target.sources.CheckSource(request, timeout=_SECONDS)
    _say(console, f"{name} is {_state(checked.source)}. {checked.source.problem}".rstrip())
    for change in checked.changes:
        for line in _change_lines(change):
            _say(console, line)
    _show_left_out(console, checked.left_out)
    if checked.changes:
        _say(console, f"To take this over: pawl sources approve {name} {checked.found_hash}")
    return 0 if checked.source.state == source_pb2.SOURCE_STATE_READY else EXIT_UNSUCCESSFUL


@app.command()
@command(asks="tools")
async def approve(
    target: AsyncClient,
    console: Console,
    name: Name,
    definitions_hash: Annotated[str, typer.Argument(help="What `pawl sources check` showed.", show_default=False)],
) -> None:
    """Take the definitions over that a source has now."""
    request = source_pb2.ApproveSourceRequest(name=name, definitions_hash=definitions_hash)
    approved = await target.sources.ApproveSource(request, timeout=_SECONDS)
    _show_tools(console, approved.source.tools)


@app.command()
@command(asks="tools")
async def remove(target: AsyncClient, console: Console, name: Name) -> None:
    """Take a source and its tools out."""
    request = source_pb2.RemoveSourceRequest(name=name)
    await target.sources.RemoveSource(request, timeout=_SECONDS)
    _say(console, f"{name} and its tools are gone.")


async def _add(
    target: AsyncClient, console: Console, config: source_pb2.SourceConfig, policies: list[str] | None, *, replace: bool
) -> None:
    config.policies.extend(map(source_policies.policy_of, policies or ()))
    request = source_pb2.AddSourceRequest(config=config, replace=replace)
    added = await target.sources.AddSource(request, timeout=_SECONDS)
    _show_tools(console, added.source.tools)
    _show_left_out(console, added.left_out)


def _pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in given or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise CommandError(f"{option} {item!r} must be of the form NAME=value.")
        pairs[name] = value
    return pairs


def _show_tools(console: Console, tools: Sequence[tool_pb2.Tool]) -> None:
    rows = [
        (
            wording.clean(tool.definition.name),
            str(tool.version),
            wording.value_name(call_pb2.ToolCategory, tool.definition.category),
            wording.value_name(call_pb2.EffectClass, tool.definition.effect_class),
            wording.one_line(tool.definition.description, 80),
        )
        for tool in tools
    ]
    show_table(console, ("tool", "version", "category", "effect", "what it does"), rows)


def _show_left_out(console: Console, tools: Sequence[source_pb2.LeftOutTool]) -> None:
    for tool in tools:
        _say(console, f"{tool.name} was left out: {tool.reason}.")


def _change_lines(change: source_pb2.SourceChange) -> Iterator[str]:
    """Give what an admin has to see of a change: both definitions, as they are."""
    if not change.HasField("found"):
        yield f"- {change.tool_name} is gone"
        return
    if not change.HasField("approved"):
        yield f"+ {change.tool_name} is new: {change.found.description}"
        yield f"  arguments: {change.found.arguments_schema_json.decode()}"
        return
    yield f"* {change.tool_name} has changed"
    if change.approved == change.found:
        yield "  in what is not part of its definition: title, results or annotations"
    for field in ("description", "arguments_schema_json", "category", "effect_class", *_TIMEOUTS):
        before, after = getattr(change.approved, field), getattr(change.found, field)
        if before != after:
            yield f"  {field} was {_text(before)}"
            yield f"  {field} is  {_text(after)}"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _say(console: Console, line: str) -> None:
    console.print(wording.clean(line), markup=False, soft_wrap=True)


def _state(source: source_pb2.Source) -> str:
    return wording.value_name(source_pb2.SourceState, source.state)


def _where(config: source_pb2.SourceConfig) -> str:
    match config.WhichOneof("kind"):
        case "mcp_stdio":
            return " ".join(config.mcp_stdio.command)
        case "mcp_http":
            return config.mcp_http.url
        case "open_api":
            return config.open_api.base_url or config.open_api.document_url or "an OpenAPI document"
        case _:
            return config.http_endpoint.url
