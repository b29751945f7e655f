"""Implements `pawl agents` and `pawl apply`, which manage a store's agents, directly or from files."""

from __future__ import annotations

import asyncio
import base64
import difflib
import json
from collections.abc import AsyncIterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import yaml
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from rich.console import Console

from pawl.agent.v1 import agents_pb2
from pawl.chassis import strict_json
from pawl.chassis.ids import DRAFT
from pawl.chassis.process.start import StartError
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, WithLabels, Yes, command, confirm, labels_of, read_file, say
from pawl.cli.contract import Columns, Json, Option, ask, items, listing, show_items, verb
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient
from pawl.errors import AgentNotFound, PawlError
from pawl.event.v1 import agent_pb2

if TYPE_CHECKING:  # The launcher imports PostgreSQL and NATS clients.
    from pawl.launcher.options import SuiteOptions

_FILE_BYTES_MAX: Final = 1024 * 1024
_WARNING: Final = "  warning: "
# Delays between attempts to save the agents of PAWL_AGENTS.
_RETRY_DELAYS_SECONDS: Final = (2.0, 5.0, 10.0, 20.0, 23.0)
_ENDINGS: Final = (".yaml", ".yml", ".json")
# Default values of options, which are left out of the output.
_DEFAULTS: Final = frozenset(
    {
        *("ROUND_LIMIT_POLICY_FINAL_ANSWER", "BATCH_ORDER_WAIT_FOR_DECISIONS", "UNKNOWN_OUTCOME_POLICY_TELL_MODEL"),
        *("TOKEN_BUDGET_POLICY_WAIT", "APPROVAL_EXPIRY_POLICY_DENY", "MODE_AUTO"),
    }
)

_NAME: Final = {"name": "name"}


def _tools(agent: agent_pb2.AgentVersion) -> str:
    selected = agent.definition.tools
    is_open = not any((selected.names, selected.sources, selected.patterns))
    return "none" if agent.definition.options.without_tools else "all" if is_open else str(len(agent.tool_names))


_AGENT: Final[Columns] = {
    "agent": lambda agent: wording.clean(f"{DRAFT if agent.draft else ''}{agent.definition.name}"),
    "version": lambda agent: str(agent.version) if agent.version else "deployment",
    "tools": _tools,
    "delegates to": "definition.delegates_to",
    "title": "definition.card.title",
}

app = typer.Typer(help="List, show and delete the store's agents.", no_args_is_help=True)
app.command("show")(
    verb(
        agents_pb2.GetAgentRequest(),
        {**_NAME, "--version": "version"},
        "Show an agent as a file for `pawl apply`. Lists the tools selected when it was saved.",
        lambda answer, _: wording.clean(to_yaml(answer.agent)).rstrip("\n"),
    )
)
app.command("versions")(
    listing(
        agents_pb2.ListAgentVersionsRequest(),
        _NAME,
        "List an agent's versions, newest first. Also works for a deleted agent.",
        {"version": "version", "saved": "create_time", "by": "create_user_id"},
        none="There are no versions.",
    )
)
app.command("usage")(
    listing(
        agents_pb2.GetAgentUsageRequest(days=30),
        {**_NAME, "--days": Option(path="days", help="Number of days, up to today.")},
        "Show an agent's daily usage (days in UTC), newest first. Requires the admin role.",
        {
            "day": "day",
            "runs": "runs",
            "users": "users",
            "model calls": "usage.model_calls",
            "input tokens": "usage.input_tokens",
            "output tokens": "usage.output_tokens",
        },
        none="There is no usage.",
    )
)


@app.command("list")
@command()
async def list_agents(target: AsyncClient, console: Console, *, label: WithLabels = None, json: Json = False) -> None:
    """List the agents you may use, then your drafts."""
    listed = [agents_pb2.ListAgentsRequest(drafts=drafts, labels=labels_of(label)) for drafts in (False, True)]
    found = [agent for request in listed for agent in await items(target, request) if agent.draft == request.drafts]
    show_items(console, found, _AGENT, none="There are no agents.", json=json)


@app.command()
@command()
async def delete(
    target: AsyncClient,
    console: Console,
    name: Annotated[str, typer.Argument(help="Name of the agent; draft/NAME for one of your drafts.")],
    *,
    yes: Yes = False,
) -> int:
    """Delete an agent, or your draft/NAME. No new run starts with it; its current runs continue."""
    if not confirm(f"Delete the agent {name}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    request = agents_pb2.DeleteDraftRequest if name.startswith(DRAFT) else agents_pb2.DeleteAgentRequest
    await ask(target, request(name=name.removeprefix(DRAFT)))
    say(console, f"Deleted {wording.one_line(name)}.")
    return 0


@command()
async def apply(
    target: AsyncClient,
    console: Console,
    *,
    file: Annotated[
        list[Path],
        typer.Option(
            "--file", "-f", help="A file with agents, or a folder of such files. Repeatable.", show_default=False
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without saving them.")] = False,
    draft: Annotated[
        bool, typer.Option("--draft", help="Save them as drafts (draft/NAME) that only you can use.")
    ] = False,
) -> None:
    """Save the agents in files, and show the changes.

    A file is YAML or JSON, with one agent or several separated by ---. Agents that are not in the files remain
    unchanged.
    """
    async for line in changes(target, read(file), dry_run=dry_run, draft=draft):
        say(console, wording.clean(line))


async def changes(
    target: AsyncClient,
    definitions: Sequence[agent_pb2.AgentDefinition],
    *,
    dry_run: bool = False,
    draft: bool = False,
) -> AsyncIterator[str]:
    """Save agents or drafts, delegates first, and yield lines that describe the changes."""
    # Drafts can delegate only to the store's agents.
    known = frozenset[str]() if draft else {definition.name for definition in definitions}
    for definition in sorted_by_delegation(definitions):
        name = f"{DRAFT if draft else ''}{definition.name}"
        before = await _newest(target, name)
        later = [
            other
            for other in definition.delegates_to
            if dry_run and other in known and not await _newest(target, other)
        ]
        asked = agent_pb2.AgentDefinition()
        asked.CopyFrom(definition)
        # These agents are created later in this call.
        asked.delegates_to[:] = [name for name in definition.delegates_to if name not in later]
        request = agents_pb2.UpdateDraftRequest if draft else agents_pb2.UpdateAgentRequest
        saved = await ask(target, request(definition=asked, validate_only=dry_run))
        saved.agent.definition.delegates_to[:] = definition.delegates_to
        is_new = saved.created or bool(later)
        yield f"{name}: {f'version {saved.agent.version}' if is_new else 'unchanged'}"
        old = to_yaml(before).splitlines() if before is not None else []
        for line in difflib.unified_diff(old, to_yaml(saved.agent).splitlines(), n=1, lineterm=""):
            if is_new and not line.startswith(("---", "+++", "@@")):
                yield f"  {line}"
        for pattern in saved.unmatched:
            yield f"{_WARNING}{pattern} matches no available tool"


async def apply_folder(options: SuiteOptions) -> None:
    """Save the agents in PAWL_AGENTS to a suite that has just started, and print the changes.

    Prints errors and retries for a minute, because workers and sources may still add tools.
    """
    printed = set[str]()
    for wait_seconds in _RETRY_DELAYS_SECONDS if options.agents else ():
        lines: list[str] = []
        try:
            async with AsyncClient(data=options.data) as target:
                async for line in changes(target, read([options.agents or Path()])):
                    lines.append(line)  # noqa: PERF401  # keeps the lines before an error
        except (CommandError, StartError, PawlError) as error:
            lines.append(f"{_WARNING}{explain(error, [])}")
        for line in lines:
            if not line.endswith(": unchanged") and line not in printed:
                print(f"PAWL_AGENTS: {wording.clean(line)}", flush=True)
        printed.update(lines)
        if not any(line.startswith(_WARNING) for line in lines):
            return
        await asyncio.sleep(wait_seconds)
    if options.agents:
        print("PAWL_AGENTS: no more retries; fix the problems above, then run `pawl apply`", flush=True)


def read(paths: Sequence[Path]) -> list[agent_pb2.AgentDefinition]:
    """Read agents from files and folders.

    Raises:
        CommandError: A file cannot be read or parsed, two agents have the same name, or there are no agents.
    """
    found: dict[str, agent_pb2.AgentDefinition] = {}
    for path in paths:
        files = sorted(each for each in path.iterdir() if each.suffix in _ENDINGS) if path.is_dir() else [path]
        for file in files:
            for definition in _definitions(file):
                if definition.name in found:
                    raise CommandError(f"{file}: the agent {definition.name!r} is defined twice. Remove one.")
                found[definition.name] = definition
    if not found:
        raise CommandError(
            f"No agents found in {', '.join(map(str, paths))}. Files must end with .yaml, .yml or .json."
        )
    return list(found.values())


def sorted_by_delegation(definitions: Sequence[agent_pb2.AgentDefinition]) -> list[agent_pb2.AgentDefinition]:
    """Sort agents so that each follows the agents it delegates to.

    Raises:
        CommandError: Agents delegate in a cycle.
    """
    named = {each.name: each for each in definitions}
    try:
        order = TopologicalSorter(
            {name: named.keys() & each.delegates_to for name, each in named.items()}
        ).static_order()
        return [named[name] for name in order]
    except CycleError as error:
        circle = ", ".join(error.args[1])
        raise CommandError(f"The agents {circle} delegate to each other in a cycle. Remove one delegation.") from None


def to_yaml(agent: agent_pb2.AgentVersion) -> str:
    """Return an agent as YAML, with its selected tools in comments."""
    fields = _without_defaults(MessageToDict(agent.definition, preserving_proto_field_name=True))
    asked = fields.get("options", {}).get("response_format", {})
    if "schema_json" in asked:
        asked["schema"] = json.loads(base64.b64decode(asked.pop("schema_json")))
    if "daily_tokens_max" in fields:
        fields["daily_tokens_max"] = agent.definition.daily_tokens_max
    if "labels" in fields:
        fields["labels"] = dict(sorted(fields["labels"].items()))
    text: str = yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text + "".join(f"# tool: {name}\n" for name in agent.tool_names)


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys in a mapping, because YAML would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]!r} is defined twice", node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _without_defaults(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {
        name: _without_defaults(each)
        for name, each in value.items()
        if not (isinstance(each, str) and each in _DEFAULTS)
    }
    return {name: each for name, each in kept.items() if each != {}}


def _definitions(file: Path) -> list[agent_pb2.AgentDefinition]:
    content = read_file(file, _FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise CommandError(f"{file} is larger than {_FILE_BYTES_MAX} bytes. Split it into several files.")
    try:
        documents = [each for each in yaml.load_all(content, _Loader) if each is not None]
        return [_definition(each) for each in documents]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is not YAML: {wording.one_line(str(error), 300)}.") from None
    except (ParseError, RecursionError) as error:
        raise CommandError(f"{file} is not a valid agent: {wording.one_line(str(error), 300)}.") from None


def _definition(document: object) -> agent_pb2.AgentDefinition:
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        raise ParseError("an agent must be a mapping with a `name`")
    return ParseDict(_with_schema_json(document), agent_pb2.AgentDefinition())


def _with_schema_json(document: dict[str, Any]) -> dict[str, Any]:
    """Convert the response format's `schema` mapping to the bytes that the contract expects."""
    options = document.get("options")
    asked = options.get("response_format") if isinstance(options, dict) else None
    if not isinstance(options, dict) or not isinstance(asked, dict) or "schema" not in asked:
        return document
    try:
        schema_json = strict_json.dumps_canonical(asked["schema"])
    except PawlError as error:
        raise ParseError(f"its response_format schema is not JSON: {error.message}") from None
    rest = {name: value for name, value in asked.items() if name != "schema"}
    form = {**rest, "schema_json": base64.b64encode(schema_json).decode()}
    return {**document, "options": {**options, "response_format": form}}


async def _newest(target: AsyncClient, name: str) -> agent_pb2.AgentVersion | None:
    try:
        found = (await target.agent_register.GetAgent(agents_pb2.GetAgentRequest(name=name))).agent
    except AgentNotFound:
        return None
    return found if found.version else None
