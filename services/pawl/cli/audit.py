"""`pawl audit list` and `verify`, and `pawl tools stats`: what operators see of what tools did."""

from __future__ import annotations

import re
from datetime import UTC
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agents_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, narrows, time_of
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.tool.v1 import audit_pb2, tool_pb2

_HEAD: Final = re.compile(r"(head )?(?P<seq>[1-9][0-9]{0,17}):(?P<hash>[0-9a-fA-F]{64})")

app = typer.Typer(
    name="audit",
    help="Read the audit chain of the store and verify it. Needs the role operator or admin where there are API keys.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, with everything, to keep elsewhere.")]
KnownHead = Annotated[str, typer.Option(help="A head that was printed earlier and kept elsewhere: <seq>:<hash>.")]
Since = Annotated[str, typer.Option(help="From this time on, UTC: 2026-01-31 or 2026-01-31T09:00.")]
Before = Annotated[str, typer.Option(help="Before this time, UTC.")]


class Kind(StrEnum):
    """The kinds of entry about a call."""

    PROPOSED = "proposed"
    DECIDED = "decided"
    EXECUTED = "executed"
    RETURNED = "returned"


@app.command("list")
@command(asks="tools")
async def list_(
    target: AsyncClient,
    console: Console,
    *,
    run: Annotated[str, typer.Option(help="Only of this run.", callback=narrows)] = "",
    call: Annotated[str, typer.Option(help="Only of this call.", callback=narrows)] = "",
    tool: Annotated[str, typer.Option(help="Only of this tool.", callback=narrows)] = "",
    of_user: Annotated[str, typer.Option(help="Only of runs of this user.", callback=narrows)] = "",
    agent: Annotated[str, typer.Option(help="Only of runs of this agent.", callback=narrows)] = "",
    kind: Annotated[Kind | None, typer.Option(help="Only of this kind.")] = None,
    since: Since = "",
    before: Before = "",
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many, the newest.", min=1)] = 50,
    json: Json = False,
) -> None:
    """List entries of the audit chain, the newest last."""
    request = audit_pb2.ListAuditRequest(run_id=run, call_id=call, tool_name=tool, user_id=of_user, agent_name=agent)
    if kind is not None:
        request.kind = audit_pb2.AuditKind.Value(f"AUDIT_KIND_{kind.name}")
    _set_span(request, since, before)
    entries: list[audit_pb2.AuditEntry] = []
    async for page in target.pages(target.auditor.ListAudit, request):
        entries += page.entries
        if len(entries) >= count:
            break
    entries = entries[:count][::-1]
    if json:
        for entry in entries:
            console.print(wording.document_line(entry), markup=False, soft_wrap=True)
    elif entries:
        names = ("seq", "time", "what", "tool", "call", "user", "credential", "verdict", "reason")
        show_table(console, names, [_row(entry) for entry in entries])
    else:
        console.print("There are no such entries.")


@app.command()
@command(asks="tools")
async def verify(
    target: AsyncClient,
    console: Console,
    *,
    known_head: KnownHead = "",
) -> int:
    """Read the whole audit chain and say whether anybody has changed it.

    Prints the head of the chain: keep it where nobody can write who can write to
    the database, and give it as --known-head the next time.
    """
    request = audit_pb2.VerifyAuditRequest()
    if known_head:
        request.known_seq, request.known_hash = _read_head(known_head)
    last = audit_pb2.VerifyAuditResponse()
    async for answer in target.auditor.VerifyAudit(request):
        last = answer
    if last.HasField("problem"):
        problem = wording.clean(last.problem.explanation)
        console.print(f"{last.problem.kind}: {problem}. The entries before it are good.", markup=False, style="red")
        return EXIT_UNSUCCESSFUL
    console.print(f"The audit chain is whole: {last.verified_seq} entries.", markup=False)
    if last.verified_seq:
        console.print(f"head {last.verified_seq}:{last.verified_hash}", markup=False, soft_wrap=True)
    return 0


@command(asks="tools")
async def stats(
    target: AsyncClient,
    console: Console,
    tool: Annotated[str, typer.Argument(help="Only this tool.", show_default=False, callback=narrows)] = "",
    *,
    agent: Annotated[str, typer.Option("--agent", help="Only in runs of this agent.", callback=narrows)] = "",
    by_agent: Annotated[bool, typer.Option("--by-agent", help="For each agent apart.")] = False,
    since: Since = "",
    before: Before = "",
) -> None:
    """Show what each tool did: executions, errors, durations, bytes, approvals.

    Needs the role operator or admin where there are API keys.
    """
    request = audit_pb2.GetToolAnalyticsRequest(tool_name=tool, agent_name=agent, by_agent=by_agent)
    _set_span(request, since, before)
    figures = (await target.auditor.GetToolAnalytics(request)).tools
    names = ("tool", "runs", "errors", "cached", "p50", "p95", "bytes", "asked", "approved", "edited", "rejected")
    if figures:
        agents = [(one.agent_name or "unknown",) if by_agent else () for one in figures]
        rows = [(*agent, *_figures_row(one)) for agent, one in zip(agents, figures, strict=True)]
        show_table(console, (*(("agent",) if by_agent else ()), *names), rows)
        return
    if tool:
        await target.tool_register.GetTool(tool_pb2.GetToolRequest(name=tool))
    if agent:
        await target.agent_register.GetAgent(agents_pb2.GetAgentRequest(name=agent))
    console.print("No tool did anything.")


def _row(entry: audit_pb2.AuditEntry) -> tuple[str, ...]:
    by = f" by {_named(entry.by_user_id, entry.by_delegate_user_id)}" if entry.by_user_id else ""
    return (
        str(entry.seq),
        wording.time_text(entry.time),
        wording.value_name(audit_pb2.AuditKind, entry.kind),
        wording.clean(entry.tool_name),
        entry.call_id,
        _named(entry.user_id, entry.delegate_user_id),
        entry.by_credential_id or entry.credential_id,
        f"{entry.verdict.lower()}{by}",
        wording.clean(entry.reason),
    )


def _named(user_id: str, delegate_user_id: str) -> str:
    return f"{delegate_user_id} for {user_id}" if delegate_user_id else user_id


def _figures_row(figures: audit_pb2.ToolFigures) -> tuple[str, ...]:
    return (
        wording.clean(figures.tool_name),
        str(figures.execution_count),
        str(figures.error_count),
        str(figures.cached_count),
        f"{figures.p50_seconds:.3g} s",
        f"{figures.p95_seconds:.3g} s",
        str(figures.result_bytes),
        str(figures.approval_asked_count),
        str(figures.approved_count),
        str(figures.edited_count),
        str(figures.rejected_count),
    )


def _set_span(request: audit_pb2.ListAuditRequest | audit_pb2.GetToolAnalyticsRequest, since: str, before: str) -> None:
    if since:
        request.since_time.CopyFrom(time_of(since, "since", UTC))
    if before:
        request.before_time.CopyFrom(time_of(before, "before", UTC))


def _read_head(text: str) -> tuple[int, str]:
    match = _HEAD.fullmatch(text)
    if match is None:
        raise CommandError(f"{text!r} is not a head like 12:<64 hex digits>.", parameter="known_head")
    return int(match["seq"]), match["hash"]
