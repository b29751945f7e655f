"""Implements `pawl inbox`, which lists pending items and lets users decide on them at the keyboard."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.cli import answers, wording
from pawl.cli.command import LineReader, command, follows, say
from pawl.cli.decisions import remembered, rule_notice
from pawl.cli.failure import CommandError, explain
from pawl.cli.transcript import Transcript, decides, hint, top_up_hint
from pawl.client import AsyncClient, approve
from pawl.client.client import Item
from pawl.client.decisions import TAKEN
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2, run_pb2

_IN_INBOX: Final = ", always to allow the tool in this conversation, all to approve all: "
_YES: Final = frozenset({"y", "yes"})
_NO: Final = frozenset({"", "n", "no"})


@command()
async def inbox(
    target: AsyncClient,
    console: Console,
    *,
    only_list: Annotated[bool, typer.Option("--list", help="Only list; do not ask for decisions.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Wait for new items until Ctrl-C.")] = False,
    all_users: Annotated[
        bool,
        typer.Option(
            "--all-users", help="Show what is waiting for approval or tokens in the whole store. For approvers."
        ),
    ] = False,
) -> None:
    """Show what is waiting for you, across all runs, and decide.

    Without a terminal, or with --list, it only lists the items.
    """
    scope = agent_pb2.PENDING_SCOPE_STORE if all_users else agent_pb2.PENDING_SCOPE_MINE
    wanted = agent_pb2.PendingFilter(scope=scope)
    keyboard = LineReader() if not only_list and sys.stdin.isatty() else None
    reviewer = Reviewer(target, console, keyboard)
    if watch:
        await reviewer.watch(wanted)
        return
    waiting = [item async for item in target.pending(wanted)]
    if not waiting:
        say(console, "Nothing is waiting for approval." if all_users else "Nothing is waiting for you.")
        return
    await reviewer.review(waiting)


class Reviewer:
    """A review of pending items one by one. Without a keyboard, it only lists the items."""

    def __init__(self, target: AsyncClient, console: Console, keyboard: LineReader | None) -> None:
        self._target = target
        self._console = console
        self._keyboard = keyboard
        self._transcript = Transcript(console)
        self._help_shown = False

    async def review(self, items: Sequence[Item]) -> bool:
        """Present `items`. Return whether to continue with more."""
        for number, item in enumerate(items):
            if not await self.review_item(item, items[number + 1 :]):
                return False
        return True

    async def watch(self, wanted: agent_pb2.PendingFilter) -> None:
        """Present pending and new items. Present an item again whenever it changes."""
        follows(self._target)
        seen: dict[str, tuple[object, ...]] = {}
        async with aclosing(self._target.watch_pending(wanted)) as snapshots:
            async for waiting in snapshots:
                new = [item for name, item in waiting.items() if seen.get(name) != _shown(item)]
                seen |= {name: _shown(item) for name, item in waiting.items()}
                if not await self.review(new):
                    return

    async def _decides(self, call: call_pb2.Call) -> bool:
        """Return whether the user who started the run may decide. Only approvers see calls of other users."""
        try:
            return decides(await self._target.get(call.run_id))
        except PawlError:
            return True

    async def review_item(self, item: Item, others: Sequence[Item]) -> bool:
        """Show an item and ask for a decision. Return whether to continue."""
        if isinstance(item, call_pb2.Call):
            return await self._put_call(item, [other for other in others if isinstance(other, call_pb2.Call)])
        self._transcript.card(f"{item.run_id} is waiting for more tokens", [wording.budget_text(item)], "yellow")
        is_own = item.conversation_id != ""  # The conversation id is hidden for runs of other users.
        how = top_up_hint(item) if is_own else f"waiting for its user, {wording.clean(item.user_id)}"
        say(self._console, f"  {how}")
        return True

    async def _put_call(self, call: call_pb2.Call, others: Sequence[call_pb2.Call]) -> bool:
        self._transcript.pending(call)
        if self._keyboard is None or call.state not in answers.DECIDABLE:
            say(self._console, f"  {hint(call, decides=await self._decides(call))}")
            return True
        if not self._help_shown:
            say(self._console, "An empty line skips to the next item, Ctrl-D exits.", "dim")
            self._help_shown = True
        gated = [other for other in others if other.state == call_pb2.CALL_STATE_AWAITING_APPROVAL]
        while True:
            is_gated = call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL
            line = await self._line(f"{answers.choices(call)}{_IN_INBOX}" if is_gated else answers.prompt(call))
            if line is None:
                return False
            word = line.strip().lower()
            if not word:
                return True
            try:
                if word == "all" and is_gated:
                    return await self._approve_all([call, *gated])
                if word == "always" and is_gated:
                    done = await self._always(call)
                else:
                    done = await self._settle(line, call)
            except CommandError as error:
                say(self._console, str(error), "yellow")
            except Exception as error:  # noqa: BLE001  # for example decided by another user; continue with the next
                say(self._console, explain(error, list(self._target.agent)), "red")
                return True
            else:
                say(self._console, done, "green")
                return True

    async def _line(self, prompt: str) -> str | None:
        if self._keyboard is None:
            return None
        self._console.print(prompt, end="", markup=False)
        try:
            line = await self._keyboard.line()
        except asyncio.CancelledError:
            self._console.print()
            raise
        if line is None:
            self._console.print()
        return line

    async def _settle(self, line: str, call: call_pb2.Call) -> str:
        if call.state == call_pb2.CALL_STATE_OFFERED:
            return await self._return(answers.result_of(line, call))
        decision = answers.decision_of(line, call)
        await self._target.decide(decision)
        return answers.done(decision, call)

    async def _always(self, call: call_pb2.Call) -> str:
        """Approve a call, and its tool for the rest of the conversation.

        If the call cannot be approved, the tool's approval is revoked.
        """
        decision = approve(call)
        async with remembered(self._target, call, "conversation") as rule:
            await self._target.decide(decision)
        return f"{answers.done(decision, call)} {rule_notice(rule)}"

    async def _return(self, result: types_pb2.ToolResult) -> str:
        try:
            await self._target.submit(result)
        except PawlError as error:
            raise CommandError(f"Not accepted: {wording.sentence(error.message)}") from None
        return "Result accepted."

    async def _approve_all(self, calls: Sequence[call_pb2.Call]) -> bool:
        for call in calls[1:]:
            self._transcript.pending(call)
        question = f"Approve these {len(calls)} calls as shown? [y/N]: "
        while (line := await self._line(question)) is not None and (word := line.strip().lower()) not in _YES:
            if word in _NO:
                return True
            say(self._console, "Nothing was approved. Type y or n.", "yellow")
        if line is None:
            return False
        for receipt in await self._target.decide_all([approve(call) for call in calls]):
            taken = receipt.status in TAKEN
            outcome = "Approved." if taken else f"Not approved: {wording.sentence(receipt.message or receipt.reason)}"
            say(self._console, f"{receipt.call_id}: {outcome}", "green" if taken else "red")
        return False


def _shown(item: Item) -> tuple[object, ...]:
    if isinstance(item, run_pb2.Run):
        return (wording.budget_text(item),)
    call, approval = item, item.approval
    return call.state, approval.digest, len(approval.approvals), approval.escalated
