"""`pawl whoami`: who calls, what that one may do, and what the deployment offers."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console

from pawl.agent.v1 import whoami_pb2
from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2

_DECIDES: Final = {
    whoami_pb2.DECISION_RIGHT_OWN_RUNS: "gated calls and questions of your own runs",
    whoami_pb2.DECISION_RIGHT_STORE: "gated calls of the whole store, and questions of your own runs",
    whoami_pb2.DECISION_RIGHT_QUESTIONS: "questions of your own runs, and no gated call",
}


@command()
async def whoami(
    target: AsyncClient,
    console: Console,
    *,
    limits: Annotated[
        bool, typer.Option("--limits", help="Also the limits of runs, with what may be asked for.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one line of JSON.")] = False,
) -> None:
    """Say who you are here, what you may do, and what the deployment offers."""
    found = await target.whoami()
    if json:
        print(MessageToJson(found, preserving_proto_field_name=True, indent=None))
        return
    for line in (*caller_lines(found.caller), *deployment_lines(found.deployment)):
        console.print(line, markup=False, soft_wrap=True)
    if limits:
        show_table(console, ("limit", "default", "at most"), limit_rows(found.deployment))


def caller_lines(caller: whoami_pb2.CallerInfo) -> list[str]:
    """Return who calls."""
    where = f"of the store {caller.store_id}" if caller.store_id else "of the deployment"
    through = f", for whom {wording.clean(caller.delegate_user_id)} acts" if caller.delegate_user_id else ""
    until = f"until {wording.time_text(caller.expire_time)}" if caller.HasField("expire_time") else "without an end"
    return [
        f"{wording.clean(caller.user_id)} {where}{through}",
        f"roles: {', '.join(map(wording.clean, caller.roles)) or 'none, as a member'}",
        f"credential: {wording.clean(caller.credential_id)}, {until}",
        f"decides: {_DECIDES.get(caller.decision_right, 'nothing')}",
    ]


def deployment_lines(deployment: whoami_pb2.DeploymentInfo) -> list[str]:
    """Return what the deployment offers."""
    tools = f", {wording.count_text(deployment.tool_count, 'tool')}" if deployment.HasField("tool_count") else ""
    several = deployment.approvals_required > 1
    approvals = f", {deployment.approvals_required} people approve each gated call" if several else ""
    lines = [f"Pawl {deployment.version}: model {wording.clean(deployment.model)}{tools}{approvals}"]
    if deployment.agent_names:
        lines.append(f"agents: {', '.join(map(wording.clean, deployment.agent_names))}")
    if deployment.part_kinds:
        lines.append(f"messages may have: {', '.join(map(wording.clean, deployment.part_kinds))}")
    return lines


def limit_rows(deployment: whoami_pb2.DeploymentInfo) -> list[tuple[str, ...]]:
    """Return each limit of a run with its default and the most that may be asked for."""
    names = run_pb2.RunLimits.DESCRIPTOR.fields_by_name
    return [
        (name, f"{getattr(deployment.limits, name):g}", f"{getattr(deployment.ceilings, name):g}")
        for name in names
        if deployment.limits.HasField(name)  # type: ignore[arg-type]  # a field of the message
    ]
