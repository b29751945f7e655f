"""Implements `pawl conversations` and `pawl fork`, which read, organize, share and erase conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import conversation_pb2
from pawl.chassis.visible import HIDDEN
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, confirm, json_of, labels_of, read_file, say, show_table
from pawl.cli.contract import Columns, Json, Option, json_line, listing
from pawl.cli.failure import CommandError
from pawl.cli.runs import Agent, follow
from pawl.client import AsyncClient
from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2, message_pb2
from pawl.event.v1 import conversation_pb2 as values

ConversationId = Annotated[
    str | None, typer.Argument(help="Id of the conversation; omit it with --key.", show_default=False)
]
Key = Annotated[str, typer.Option("--key", help="Your key for the conversation, instead of its id.")]
_HISTORY_BYTES_MAX: Final = 4 * 1024 * 1024
# How long the command waits for an erasure, which continues without it.
_ERASURE_SECONDS: Final = 30.0
_SPEAKERS: Final = {
    message_pb2.ROLE_USER: ("you", "bold"),
    message_pb2.ROLE_ASSISTANT: ("agent", ""),
    message_pb2.ROLE_SUMMARY: ("summary", "dim"),
    message_pb2.ROLE_NOTICE: ("background", "dim"),
}


def _state(conversation: values.Conversation) -> str:
    if conversation.active_run_id:
        return f"{1 + conversation.queued_run_count} runs" if conversation.queued_run_count else "1 run"
    return "archived" if conversation.archived else ""


def _title(conversation: values.Conversation) -> str:
    return wording.one_line(conversation.title, 200) or "(no title)"


_COLUMNS: Final[Columns] = {
    "conversation": "conversation_id",
    "last used": "update_time",
    "user": "user_id",
    "state": _state,
    "title": _title,
}

app = typer.Typer(help="List, search, share and erase conversations.", no_args_is_help=True)
app.command("list")(
    listing(
        conversation_pb2.ListConversationsRequest(archived=False),
        {
            "--archived": Option(path="archived", help="Only archived conversations.", constant=True),
            "--label": "labels",
            "--shared": "shared",
        },
        "List your conversations, most recent first.",
        _COLUMNS,
        none="There are no matching conversations. Start one with `pawl chat` or `pawl run`.",
        count=20,
    )
)
app.command("search")(
    listing(
        conversation_pb2.ListConversationsRequest(),
        {"query": Option(path="query", help="Words or prefixes of words."), "--shared": "shared"},
        "Search titles and messages, archived ones included.",
        _COLUMNS,
        none="Nothing found. All words must occur in the same message or in the title.",
        count=20,
    )
)


@app.command()
@command()
async def show(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    *,
    key: Key = "",
    numbers: Annotated[bool, typer.Option("--numbers", help="Show the message numbers for `pawl fork --at`.")] = False,
    json: Json = False,
) -> None:
    """Print a conversation."""
    conversation_id, _ = await _resolve(target, key, conversation_id)
    found = await target.get_conversation(conversation_id)
    times = f"created {wording.time_text(found.create_time)}, last used {wording.time_text(found.update_time)}"
    about = [f"{found.conversation_id}  {times}{', archived' if found.archived else ''}"]
    if not json:
        say(console, _title(found), "bold")
        say(console, [*about, wording.labels_text(found.labels)][: 1 + bool(found.labels)], "dim")
    is_shared = found.sharing in {values.SHARING_READ, values.SHARING_WRITE}
    me = (await target.whoami()).caller.user_id if is_shared else found.user_id
    calls: dict[str, dict[str, call_pb2.Call]] = {}
    async for message in target.messages(found.conversation_id):
        if json:
            print(json_line(message))
            continue
        # `pawl steps` shows your own runs' calls. Other users' calls and imported calls are shown here.
        author = message.user_id or found.user_id
        shows_calls = message.imported if author == me else found.shows_arguments
        if message.call_ids and message.run_id not in calls and shows_calls:
            calls[message.run_id] = await _calls_of_run(target, message.run_id)
        lines = call_lines(message, calls.get(message.run_id, {}), is_mine=author == me)
        _show_message(
            console, message, f"{message.number:>4}  " if numbers else "", lines, "" if author == me else author
        )


@app.command()
@command()
async def rename(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    title: Annotated[
        str | None, typer.Argument(help="The title; empty to use the start of its first message.", show_default=False)
    ] = None,
    *,
    key: Key = "",
) -> None:
    """Set a conversation's title."""
    conversation_id, titles = await _resolve(target, key, conversation_id, title, most=1)
    if not titles:
        raise CommandError("Specify a title, or '' to remove it.")
    changed = await target.update_conversation(conversation_id, title=titles[0])
    say(console, f"{changed.conversation_id} is now called: {_title(changed)}")


@app.command()
@command()
async def label(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    labels: Annotated[list[str] | None, typer.Argument(help="All labels, as key=value.", show_default=False)] = None,
    *,
    key: Key = "",
    none: Annotated[bool, typer.Option("--none", help="Remove all labels.")] = False,
) -> None:
    """Replace the labels of a conversation."""
    conversation_id, given = await _resolve(target, key, conversation_id, *(labels or ()), most=len(labels or ()) + 1)
    if bool(given) == none:
        raise CommandError("Specify all labels as key=value, or --none to remove them.")
    changed = await target.update_conversation(conversation_id, labels=labels_of(given))
    say(console, f"{changed.conversation_id} labels: {wording.labels_text(changed.labels) or 'none'}")


@app.command()
@command()
async def archive(
    target: AsyncClient, console: Console, conversation_id: ConversationId = None, *, key: Key = ""
) -> None:
    """Archive a conversation. A new message unarchives it."""
    conversation_id, _ = await _resolve(target, key, conversation_id)
    await target.update_conversation(conversation_id, archived=True)
    say(console, f"{conversation_id} is archived.")


@app.command()
@command()
async def unarchive(
    target: AsyncClient, console: Console, conversation_id: ConversationId = None, *, key: Key = ""
) -> None:
    """Move a conversation out of the archive."""
    conversation_id, _ = await _resolve(target, key, conversation_id)
    await target.update_conversation(conversation_id, archived=False)
    say(console, f"{conversation_id} is no longer archived.")


@app.command("import")
@command()
async def import_file(
    target: AsyncClient,
    console: Console,
    file: Annotated[Path, typer.Argument(help="JSON file: chat completions messages, or an object with `messages`.")],
    *,
    title: Annotated[str, typer.Option(help="The title; default: the start of its first message.")] = "",
    key: Annotated[str, typer.Option(help="Your own key for it, up to 200 bytes. It must be unused.")] = "",
) -> None:
    """Create a conversation from an existing history. Nothing in it runs again."""
    made = await target.import_conversation(_read_history(file), title=title, conversation_key=key)
    say(console, f"{made.conversation_id} has {made.last_message_number} messages: {_title(made)}")


@app.command()
@command()
async def export(
    target: AsyncClient, console: Console, conversation_id: ConversationId = None, *, key: Key = ""
) -> None:
    """Print a conversation as chat completions messages, so that another loop can continue it."""
    conversation_id, _ = await _resolve(target, key, conversation_id)
    messages = await target.export_conversation(conversation_id)
    text = json.dumps(messages, ensure_ascii=False, indent=2)
    # Hidden characters are escaped as JSON: their meaning stays, and terminals do not interpret them.
    console.out(HIDDEN.sub(lambda found: found[1] or json.dumps(found[0])[1:-1], text), highlight=False)


def _read_history(file: Path) -> Sequence[Mapping[str, Any]]:
    content = json_of(read_file(file, _HISTORY_BYTES_MAX + 1), str(file), bytes_max=_HISTORY_BYTES_MAX)
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise CommandError(f"{file} must contain a list of chat completions messages.")
    return messages


@command()
async def fork(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    text: Annotated[
        str | None,
        typer.Argument(help="A message that starts a run there. Default: do not start a run.", show_default=False),
    ] = None,
    *,
    key: Key = "",
    at: Annotated[
        int,
        typer.Option(
            help="Number of the last message to copy; 0 means the last one at which a fork is possible.", min=0
        ),
    ] = 0,
    agent: Agent = "",
    detach: Annotated[bool, typer.Option("--detach", help="With text: print the run id and exit.")] = False,
) -> int:
    """Fork a conversation at a message.

    Copies the messages up to it into a new conversation; the original is unchanged. If text is given, starts a run
    there and watches it. The exit code is the same as for `run`.
    """
    conversation_id, texts = await _resolve(target, key, conversation_id, text, most=1)
    made = await target.fork(conversation_id, at)
    shared = f"message {made.forked_number}" if made.forked_number == 1 else f"messages 1 to {made.forked_number}"
    say(console, f"{made.conversation_id} has {shared} of {conversation_id}.")
    if not any(texts):
        return 0
    started = await target.send(made.conversation_id, texts[0], agent=agent)
    if detach:
        say(console, started.run.run_id)
        return 0
    return await follow(target, console, started.run.run_id, 0)


@app.command()
@command()
async def share(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    *,
    key: Key = "",
    arguments: Annotated[
        bool, typer.Option("--arguments", help="Also show tool calls with their arguments and results.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Also let them write to it. Each user starts their own runs.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Stop sharing it.")] = False,
) -> None:
    """Share a conversation, or make it private.

    All users of your store can read a shared conversation and, with --write, write to it.
    """
    if private and (arguments or write):
        raise CommandError("--private cannot be combined with --arguments or --write.")
    conversation_id, _ = await _resolve(target, key, conversation_id)
    await target.share(conversation_id, shows_arguments=arguments, write=write, private=private)
    what = "messages and calls" if arguments else "messages"
    writes = " and write to it" if write else ""
    public = f"All users of your store may read the {what} of {conversation_id}{writes}."
    say(console, f"{conversation_id} is private." if private else public)


@app.command()
@command()
async def erase(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    *,
    key: Key = "",
    yes: Yes = False,
) -> int:
    """Erase a conversation permanently.

    Once it is erased, lists the calls whose tools received data. Until then, repeat the command to see the progress.
    """
    conversation_id, _ = await _resolve(target, key, conversation_id)
    if not confirm(f"Erase {conversation_id} permanently? Its runs are cancelled.", yes=yes):
        return EXIT_UNSUCCESSFUL
    erasure = await target.erase(conversation_id)
    with suppress(TimeoutError):
        async with asyncio.timeout(_ERASURE_SECONDS):
            erasure = await target.erase(conversation_id, wait=True)
    if not erasure.HasField("end_time"):
        waits = ", ".join(erasure.waits_for)
        say(console, f"{conversation_id} is being erased. Still waiting for: {waits}.")
        return 0
    say(console, f"{conversation_id} is erased.")
    rows = [_left_row(call) async for call in target.left_calls(conversation_id)]
    if rows:
        say(console, "These calls had started, so their tools received their arguments:")
        show_table(console, ("tool", "effect", "started", "call"), rows)
    return 0


async def _resolve(
    target: AsyncClient, key: str, first: str | None, *rest: str | None, most: int = 0
) -> tuple[str, list[str]]:
    """Return a conversation's id and the other arguments. `first` is the id, unless a key is given.

    Raises:
        CommandError: There is neither an id nor a key, or there are too many arguments.
    """
    given = [each for each in (first, *rest) if each is not None]
    conversation_id = "" if key or not given else given.pop(0)
    if not (key or conversation_id) or len(given) > most:
        raise CommandError("Specify a conversation's id, or its key with --key.")
    return conversation_id or (await target.get_conversation(conversation_key=key)).conversation_id, given


def _left_row(call: values.LeftCall) -> list[str]:
    which = call.call_id or f"earlier calls of {call.run_id}"
    return [*(wording.text_at(call, path) for path in ("tool_name", "effect_class", "start_time")), which]


async def _calls_of_run(target: AsyncClient, run_id: str) -> dict[str, call_pb2.Call]:
    try:
        return {call.call_id: call async for call in target.calls(run_id)}
    except RunNotFound:
        return {}


def call_lines(message: message_pb2.Message, calls: Mapping[str, call_pb2.Call], *, is_mine: bool) -> list[str]:
    """Describe a message's calls.

    Without details, return only their number and, in the user's own runs, how to show them.
    """
    shown = [calls[call_id] for call_id in message.call_ids if call_id in calls]
    if shown:
        return [
            f"  {wording.clean(call.tool_name)} {wording.json_line(call.arguments_json)}"
            + (f" → {wording.json_line(call.result.content_json)}" if call.HasField("result") else "")
            for call in shown
        ]
    if not message.call_ids:
        return []
    count = wording.count_text(len(message.call_ids), "call")
    return [f"  ({count}: pawl steps {message.run_id})" if is_mine else f"  ({count})"]


def _show_message(
    console: Console, message: message_pb2.Message, label: str, calls: Sequence[str], author: str
) -> None:
    speaker, style = _SPEAKERS.get(message.role, ("", ""))
    if author and message.role == message_pb2.ROLE_USER:
        speaker = wording.clean(author)
    lines = wording.quoted(f"{label}{speaker}: ", message.text or message.refusal)
    say(console, [*lines, *(f"  {each}" for each in wording.parts_of(message)), *calls], style)
