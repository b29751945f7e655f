"""The one screen of `pawl up`: what listens where, and what to type next."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.launcher.endpoints import Endpoints

_NEXT = (
    ("pawl chat", "talk to it"),
    ('pawl run "what is 17 * 23"', "start a run and watch it"),
    ("pawl inbox", "what waits for you"),
)


def show(endpoints: Endpoints, *, console: Console | None = None) -> None:
    """Prints the screen: a table on a terminal, plain aligned lines elsewhere."""
    console = console or Console()
    if console.is_terminal:
        _show_table(endpoints, console)
    else:
        _show_lines(endpoints, console)


def rows(endpoints: Endpoints) -> list[tuple[str, str, str]]:
    """What listens where: name, address, note."""
    found = [
        (name if number == 0 else f"{name} ({number + 1})", replica.grpc, f"http://{replica.metrics}/metrics")
        for name, replicas in sorted(endpoints.services.items())
        for number, replica in enumerate(replicas)
    ]
    if endpoints.model_base_url:
        found.append(("model", endpoints.model_base_url, "scripted: rules, not a language model"))
    found.append(
        ("PostgreSQL", endpoints.postgres or "PAWL_DATABASE_URL", "database pawl" if endpoints.postgres else "")
    )
    found.append(("NATS", endpoints.nats or "PAWL_NATS_URL", "JetStream" if endpoints.nats else ""))
    return found


def commands(endpoints: Endpoints) -> list[tuple[str, str]]:
    """What to type next, and what for."""
    subscriber = Path(endpoints.secrets) / "nats-subscriber.url"
    listen = f"nats sub --server \"$(cat '{subscriber}')\" 'pawl.v1.>'"
    return [*_NEXT, *([(listen, "listen to every event, with any NATS client")] if endpoints.nats else [])]


def _show_table(endpoints: Endpoints, console: Console) -> None:
    table = Table(title="Pawl is running", title_justify="left", title_style="bold", caption_justify="left")
    for heading in ("what", "listens on", ""):
        table.add_column(heading, overflow="fold")
    for row in rows(endpoints):
        table.add_row(*row)
    console.print(table)
    console.print(f"Data and logs: {endpoints.data}", soft_wrap=True, highlight=False)
    for command, purpose in commands(endpoints):
        console.print(f"  [bold]{command}[/bold]  [dim]# {purpose}[/dim]", soft_wrap=True, highlight=False)
    console.print("Ctrl-C stops everything.", highlight=False)


def _show_lines(endpoints: Endpoints, console: Console) -> None:
    lines = ["Pawl is running"]
    lines += [f"{name:<18} {address:<28} {note}".rstrip() for name, address, note in rows(endpoints)]
    lines += [f"data and logs      {endpoints.data}"]
    lines += [f"{command}  # {purpose}" for command, purpose in commands(endpoints)]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
