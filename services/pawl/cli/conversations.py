"""`pawl conversations`: what you talked about, and where it went on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from pawl.agent.v1 import conversation_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, read_file
from pawl.cli.failure import CommandError
from pawl.cli.runs import Agent, WithLabels, follow, labels_of, labels_text, show_table
from pawl.client import AsyncClient
from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2, message_pb2
from pawl.event.v1 import conversation_pb2 as values

app = typer.Typer(
    help="Your conversations: list, search, read, name, archive, share and erase them.", no_args_is_help=True
)

ConversationId = Annotated[
    str | None, typer.Argument(help="Id of the conversation; none with --key.", show_default=False)
]
Key = Annotated[str, typer.Option("--key", help="In place of the id: the key that it was begun with.")]
Count = Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)]
_HISTORY_BYTES_MAX: Final = 4 * 1024 * 1024
# So long a command waits to tell the end; it comes by itself.
_ERASURE_SECONDS: Final = 30.0
Shared = Annotated[bool, typer.Option("--shared", help="Those that others of your store share.")]
_SPEAKERS: Final = {
    message_pb2.ROLE_USER: ("you", "bold"),
    message_pb2.ROLE_ASSISTANT: ("agent", ""),
    message_pb2.ROLE_SUMMARY: ("summary", "dim"),
    message_pb2.ROLE_NOTICE: ("background", "dim"),
}


@app.command("list")
@command()
async def list_conversations(
    target: AsyncClient,
    console: Console,
    *,
    archived: Annotated[bool, typer.Option("--archived", help="Those in the archive.")] = False,
    label: WithLabels = None,
    shared: Shared = False,
    count: Count = 20,
) -> None:
    """List your conversations, the latest first."""
    request = conversation_pb2.ListConversationsRequest(
        page_size=count, archived=archived, labels=labels_of(label), shared=shared
    )
    found = (await target.conversations.ListConversations(request)).conversations
    if not found and shared:
        console.print("Nobody else of the store shares a conversation.", markup=False)
        return
    if not found and label:
        console.print("There are no such conversations.")
        return
    if not found:
        kind = "archived conversations" if archived else "conversations"
        console.print(f"You have no {kind}. `pawl chat` or `pawl run` begins one.", markup=False)
        return
    _show(console, found, shared=shared)


@app.command()
@command()
async def search(
    target: AsyncClient,
    console: Console,
    query: Annotated[str, typer.Argument(help="Words, or their beginnings.", show_default=False)],
    *,
    shared: Shared = False,
    count: Count = 20,
) -> None:
    """Find conversations, archived ones too, by words of their title or of one message."""
    request = conversation_pb2.ListConversationsRequest(page_size=count, query=query, shared=shared)
    found = (await target.conversations.ListConversations(request)).conversations
    if not found:
        console.print("Nothing is found. All words must stand in one message, or in the title.", markup=False)
        return
    _show(console, found, shared=shared)


@app.command()
@command()
async def show(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    *,
    key: Key = "",
    numbers: Annotated[bool, typer.Option("--numbers", help="Number the messages, as `pawl fork --at` does.")] = False,
) -> None:
    """Print a conversation."""
    conversation_id, _ = await _named(target, key, conversation_id)
    found = await target.get_conversation(conversation_id)
    console.print(Text(_title(found), style="bold"), soft_wrap=True)
    kind = ", archived" if found.archived else ""
    times = f"begun {wording.time_text(found.create_time)}, last used {wording.time_text(found.update_time)}{kind}"
    console.print(Text(f"{found.conversation_id}  {times}", style="dim"), soft_wrap=True)
    if found.labels:
        console.print(Text(labels_text(found.labels), style="dim"), soft_wrap=True)
    is_shared = found.sharing in {values.SHARING_READ, values.SHARING_WRITE}
    me = (await target.whoami()).caller.user_id if is_shared else found.user_id
    calls: dict[str, dict[str, call_pb2.Call]] = {}
    async for message in target.messages(found.conversation_id):
        # `pawl steps` shows calls of one's own runs. Those of others, and of what came from elsewhere, stand here.
        author = message.user_id or found.user_id
        is_mine = author == me
        if (
            message.call_ids
            and message.run_id not in calls
            and (message.imported if is_mine else found.shows_arguments)
        ):
            calls[message.run_id] = await _calls_of_run(target, message.run_id)
        lines = lines_of_calls(message, calls.get(message.run_id, {}), is_mine=is_mine)
        _show_message(console, message, f"{message.number:>4}  " if numbers else "", lines, "" if is_mine else author)


@app.command()
@command()
async def rename(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    title: Annotated[
        str | None, typer.Argument(help="The title; empty for the beginning of its first message.", show_default=False)
    ] = None,
    *,
    key: Key = "",
) -> None:
    """Give a conversation a title."""
    conversation_id, titles = await _named(target, key, conversation_id, title, most=1)
    if not titles:
        raise CommandError("Give a title, be it an empty one.")
    changed = await target.update_conversation(conversation_id, title=titles[0])
    console.print(f"{changed.conversation_id} is called: {_title(changed)}", markup=False, soft_wrap=True)


@app.command()
@command()
async def label(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    labels: Annotated[
        list[str] | None, typer.Argument(help="All that it has from now on: key=value.", show_default=False)
    ] = None,
    *,
    key: Key = "",
    none: Annotated[bool, typer.Option("--none", help="Take away those that it has.")] = False,
) -> None:
    """Give a conversation labels, in place of those that it has."""
    conversation_id, given = await _named(target, key, conversation_id, *(labels or ()), most=len(labels or ()) + 1)
    if bool(given) == none:
        raise CommandError("Give all labels that it is to have, key=value; or --none to take away those that it has.")
    changed = await target.update_conversation(conversation_id, labels=labels_of(given))
    console.print(
        f"{changed.conversation_id} has: {labels_text(changed.labels) or 'no labels'}", markup=False, soft_wrap=True
    )


@app.command()
@command()
async def archive(
    target: AsyncClient, console: Console, conversation_id: ConversationId = None, *, key: Key = ""
) -> None:
    """Put a conversation out of the way. The next message to it brings it back."""
    conversation_id, _ = await _named(target, key, conversation_id)
    changed = await target.update_conversation(conversation_id, archived=True)
    console.print(f"{changed.conversation_id} is in the archive.", markup=False)


@app.command()
@command()
async def unarchive(
    target: AsyncClient, console: Console, conversation_id: ConversationId = None, *, key: Key = ""
) -> None:
    """Bring a conversation back from the archive."""
    conversation_id, _ = await _named(target, key, conversation_id)
    changed = await target.update_conversation(conversation_id, archived=False)
    console.print(f"{changed.conversation_id} is back.", markup=False)


@app.command("import")
@command()
async def import_file(
    target: AsyncClient,
    console: Console,
    file: Annotated[Path, typer.Argument(help="JSON: messages as in chat completions, or an object with them.")],
    *,
    title: Annotated[str, typer.Option(help="The title; the beginning of its first message if not given.")] = "",
    key: Annotated[str, typer.Option(help="A key of your own for it, not in use: up to 200 bytes.")] = "",
) -> None:
    """Make a conversation of a history from elsewhere. Nothing of it runs again."""
    made = await target.import_conversation(_read_history(file), title=title, conversation_key=key)
    console.print(
        f"{made.conversation_id} has {made.last_message_number} messages: {_title(made)}",
        markup=False,
        soft_wrap=True,
    )


def _read_history(file: Path) -> Sequence[Mapping[str, Any]]:
    data = read_file(file, _HISTORY_BYTES_MAX + 1)
    try:
        content = json.loads(data[:_HISTORY_BYTES_MAX])
    except (ValueError, RecursionError):
        if len(data) > _HISTORY_BYTES_MAX:
            raise CommandError(f"{file} has more than {_HISTORY_BYTES_MAX} bytes. Leave out the beginning.") from None
        raise CommandError(f"{file} is no JSON. It has a list of messages as in chat completions.") from None
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise CommandError(f"{file} has no list of messages as in chat completions.")
    return messages


@command()
async def fork(
    target: AsyncClient,
    console: Console,
    conversation_id: ConversationId = None,
    text: Annotated[
        str | None, typer.Argument(help="What the agent is to do there; nothing yet if not given.", show_default=False)
    ] = None,
    *,
    key: Key = "",
    at: Annotated[
        int,
        typer.Option(help="Number of the last message that stays; the last one where it can be forked if 0.", min=0),
    ] = 0,
    agent: Agent = "",
    detach: Annotated[bool, typer.Option("--detach", help="With a text: print the run's id and leave.")] = False,
) -> int:
    """Go on with a conversation from an earlier message, in a new one; the old one stays as it is.

    With a text it starts a run there and watches it; exit code as with `run`.
    """
    conversation_id, texts = await _named(target, key, conversation_id, text, most=1)
    made = await target.fork(conversation_id, at)
    shared = f"message {made.forked_number}" if made.forked_number == 1 else f"messages 1 to {made.forked_number}"
    console.print(f"{made.conversation_id} begins with {shared} of {conversation_id}.", markup=False, soft_wrap=True)
    if not any(texts):
        return 0
    started = await target.send(made.conversation_id, texts[0], agent=agent)
    if detach:
        console.print(started.run.run_id)
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
        bool, typer.Option("--arguments", help="Show the calls, too: what tools were given, and their results.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Let them write to it, too: each begins runs of their own.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Share it no longer.")] = False,
) -> None:
    """Let all users of your store read a conversation, or write to it, or no longer."""
    if private and (arguments or write):
        raise CommandError("Give --arguments and --write, or --private.")
    conversation_id, _ = await _named(target, key, conversation_id)
    await target.share(conversation_id, shows_arguments=arguments, write=write, private=private)
    if private:
        console.print(f"{conversation_id} is private.", markup=False, soft_wrap=True)
        return
    what = "its messages and calls" if arguments else "its messages"
    rights = "read and write to" if write else "read"
    console.print(f"All users of your store may {rights} {conversation_id}: {what}.", markup=False, soft_wrap=True)


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
    """Erase a conversation, whole and for good, and say what has left. Called again it says how far that is."""
    conversation_id, _ = await _named(target, key, conversation_id)
    if not is_sure(f"Erase {conversation_id} for good? Its runs are cancelled.", yes=yes):
        return EXIT_UNSUCCESSFUL
    erasure = await target.erase(conversation_id)
    with suppress(TimeoutError):
        async with asyncio.timeout(_ERASURE_SECONDS):
            erasure = await target.erase(conversation_id, wait=True)
    if not erasure.HasField("end_time"):
        waits = ", ".join(erasure.waits_for)
        console.print(f"{conversation_id} is being erased. What is left waits for: {waits}.", markup=False)
        return 0
    console.print(f"{conversation_id} is erased.", markup=False)
    rows = [_left_row(call) async for call in target.left_calls(conversation_id)]
    if rows:
        console.print("These calls had begun, so their tools know what they were given:", markup=False)
        show_table(console, ("tool", "effect", "begun", "call"), rows)
    return 0


async def _named(
    target: AsyncClient, key: str, first: str | None, *rest: str | None, most: int = 0
) -> tuple[str, list[str]]:
    """Return the id of a conversation, and what was given behind it: with its key in place of the id, all of it.

    Raises:
        CommandError: neither was given, or more than `most` behind it.
    """
    given = [each for each in (first, *rest) if each is not None]
    conversation_id = "" if key or not given else given.pop(0)
    if not (key or conversation_id) or len(given) > most:
        raise CommandError("Give the id of a conversation, or --key and its key.")
    return conversation_id or (await target.get_conversation(conversation_key=key)).conversation_id, given


def _left_row(call: values.LeftCall) -> tuple[str, ...]:
    effect = wording.value_name(call_pb2.EffectClass, call.effect_class).replace("_", " ")
    return wording.clean(call.tool_name), effect, *_which(call)


def _which(call: values.LeftCall) -> tuple[str, str]:
    """Return when a call began, and its id; of earlier ones of a series, which were not kept, the job's."""
    if call.call_id:
        return wording.time_text(call.start_time), call.call_id
    return "", f"earlier calls of {call.run_id}"


def _show(console: Console, found: Sequence[values.Conversation], *, shared: bool) -> None:
    """Print conversations; of those that others share, whose they are in place of what goes on there."""
    rows = [
        (
            each.conversation_id,
            wording.time_text(each.update_time),
            wording.clean(each.user_id) if shared else _state(each),
            wording.one_line(_title(each)),
        )
        for each in found
    ]
    show_table(console, ("conversation", "last used", "user" if shared else "state", "title"), rows)


def _state(conversation: values.Conversation) -> str:
    if conversation.active_run_id:
        return f"{1 + conversation.queued_run_count} runs" if conversation.queued_run_count else "1 run"
    return "archived" if conversation.archived else ""


def _title(conversation: values.Conversation) -> str:
    return wording.one_line(conversation.title, 200) or "(no title)"


async def _calls_of_run(target: AsyncClient, run_id: str) -> dict[str, call_pb2.Call]:
    """Return the calls of a run by id; none if the caller may not see them."""
    try:
        return {call.call_id: call async for call in target.calls(run_id)}
    except RunNotFound:
        return {}


def lines_of_calls(message: message_pb2.Message, calls: Mapping[str, call_pb2.Call], *, is_mine: bool) -> list[str]:
    """Return what to show of the calls of a message: themselves if there are any, else how many, and where they are."""
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
    """Print a message; `author` is empty for the caller."""
    speaker, style = _SPEAKERS.get(message.role, ("", ""))
    if author and message.role == message_pb2.ROLE_USER:
        speaker = wording.clean(author)
    lines = wording.said(f"{label}{speaker}: ", message.text or message.refusal)
    lines += [f"  {each}" for each in wording.parts_of(message)]
    for line in [*lines, *calls]:
        console.print(Text(line, style=style), soft_wrap=True)
