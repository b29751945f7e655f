"""`pawl schedules`: runs that are started again and again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, new_request_id, seconds_of, time_of
from pawl.cli.runs import Labels, labels_of, labels_text, show_table
from pawl.client import AsyncClient
from pawl.event.v1 import schedule_pb2, trigger_pb2


class Overlap(StrEnum):
    """The conduct of a fire while the run before goes on, as people type it."""

    SKIP = "skip"
    QUEUE = "queue"
    ALLOW = "allow"
    CANCEL = "cancel"


Name = Annotated[str, typer.Argument(help="Name of the schedule.", show_default=False)]
Text = Annotated[str | None, typer.Option("--text", help="The message with which each run begins.", show_default=False)]
Cron = Annotated[
    str | None,
    typer.Option(help="When: minute, hour, day of the month, month, day of the week.", show_default=False),
]
Zone = Annotated[str | None, typer.Option("--zone", help="Zone of --cron, like Europe/Berlin; UTC if not given.")]
Every = Annotated[str | None, typer.Option("--every", help="When: each 30s, 15m, 2h or 7d.", show_default=False)]
Offset = Annotated[
    str | None, typer.Option("--offset", help="So much after the full 15m or 2h of --every.", show_default=False)
]
Jitter = Annotated[
    str | None, typer.Option("--jitter", help="Up to so much later, always the same.", show_default=False)
]
Start = Annotated[
    str | None, typer.Option("--start", help="Not before this time, like 2026-01-31T09:00.", show_default=False)
]
End = Annotated[str | None, typer.Option("--end", help="Not from this time on.", show_default=False)]
WhenBusy = Annotated[Overlap | None, typer.Option("--overlap", help="While the run before goes on; by default skip.")]
CatchUp = Annotated[
    str | None,
    typer.Option("--catch-up", help="Make up for due times of so long, if nobody was there; 1h if not given."),
]
OfAgent = Annotated[str | None, typer.Option("--agent", help="Agent of the runs; 'default' if not given.")]
Key = Annotated[
    str | None, typer.Option("--conversation-key", help="One conversation for all runs; a new one each if not given.")
]

_SECONDS: Final = ("interval_seconds", "offset_seconds", "jitter_seconds", "catch_up_seconds")
_TIMES: Final = ("start_time", "end_time")

app = typer.Typer(help="Start runs again and again, at times or intervals.", no_args_is_help=True)


def _saving(*, made: bool) -> Callable[..., None]:
    """Return the command that makes a schedule, or changes one: both take the same options."""

    @command()
    async def save(
        target: AsyncClient,
        console: Console,
        name: Name,
        *,
        text: Text = None,
        cron: Cron = None,
        time_zone: Zone = None,
        interval_seconds: Every = None,
        offset_seconds: Offset = None,
        jitter_seconds: Jitter = None,
        start_time: Start = None,
        end_time: End = None,
        overlap: WhenBusy = None,
        catch_up_seconds: CatchUp = None,
        agent: OfAgent = None,
        conversation_key: Key = None,
        labels: Labels = None,
    ) -> None:
        definition = schedule_pb2.ScheduleDefinition(name=name)
        if not made:
            definition = (await target.get_schedule(name)).definition
        for old in (
            ("cron", "time_zone") if interval_seconds else ("interval_seconds", "offset_seconds") if cron else ()
        ):
            definition.ClearField(old)
        change(
            definition,
            text=text,
            cron=cron,
            time_zone=time_zone,
            interval_seconds=interval_seconds,
            offset_seconds=offset_seconds,
            jitter_seconds=jitter_seconds,
            start_time=start_time,
            end_time=end_time,
            overlap=overlap,
            catch_up_seconds=catch_up_seconds,
            agent=agent,
            conversation_key=conversation_key,
            labels=labels,
        )
        saved = await (target.create_schedule(definition) if made else target.update_schedule(definition))
        _say(console, saved)

    return save


app.command("create", help="Make a schedule: it needs --text, and --cron or --every.")(_saving(made=True))
app.command(
    "update", help="Change what is given of a schedule, whose runs have the rights of your key then. '' takes away."
)(_saving(made=False))


@app.command("list")
@command()
async def list_schedules(target: AsyncClient, console: Console) -> None:
    """List your schedules by name."""
    rows = [_row(schedule) for schedule in await target.list_schedules()]
    show_table(console, ("schedule", "when", "next", "what"), rows)


@app.command()
@command()
async def show(target: AsyncClient, console: Console, name: Name) -> None:
    """Show a schedule, its next ten times and its last twenty fires."""
    schedule = await target.get_schedule(name)
    lines = [f"{name}: {_when(schedule)}", *wording.said("text: ", schedule.definition.text)]
    lines += details(schedule.definition)
    lines += paused_lines(schedule)
    lines += ["next:", *(f"  {wording.time_text(time)}" for time in schedule.next_times)]
    lines += ["fires:", *(f"  {fire_text(fire)}" for fire in schedule.fires)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


@app.command()
@command()
async def pause(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    note: Annotated[str, typer.Option(help="Why, for whoever looks at it.", show_default=False)] = "",
) -> None:
    """Pause a schedule. What would be due meanwhile is not made up for."""
    _say(console, await target.pause_schedule(name, note))


@app.command()
@command()
async def resume(target: AsyncClient, console: Console, name: Name) -> None:
    """Have a schedule go on, with the rights of your key."""
    _say(console, await target.resume_schedule(name))


@app.command()
@command()
async def trigger(target: AsyncClient, console: Console, name: Name) -> int:
    """Fire a schedule now, also one that is paused."""
    fire = await target.trigger_schedule(name, request_id=new_request_id())
    console.print(fire_text(fire), markup=False, soft_wrap=True)
    is_good = fire.outcome in {
        schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED,
        schedule_pb2.SCHEDULE_FIRE_OUTCOME_WAITING,
    }
    return 0 if is_good else EXIT_UNSUCCESSFUL


@app.command()
@command()
async def backfill(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    begin: Annotated[str, typer.Option("--from", help="From this time on, like 2026-01-31T09:00.")],
    end: Annotated[str, typer.Option("--to", help="Before this time.")],
) -> int:
    """Fire a schedule for its due times of the past, at most 100, whether they have fired or not."""
    times = (time_of(text, name).ToDatetime(tzinfo=UTC) for text, name in ((begin, "begin"), (end, "end")))
    fires = await target.backfill_schedule(name, *times, request_id=new_request_id())
    for fire in fires:
        console.print(fire_text(fire), markup=False, soft_wrap=True)
    is_good = all(fire.outcome == schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED for fire in fires)
    return 0 if is_good else EXIT_UNSUCCESSFUL


@app.command()
@command()
async def delete(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    yes: Yes = False,
) -> int:
    """Delete a schedule with its fires. Runs that it has started go on."""
    if not is_sure(f"Delete the schedule {name}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    await target.delete_schedule(name)
    console.print(f"Deleted {wording.one_line(name)}.", markup=False, soft_wrap=True)
    return 0


def change(definition: schedule_pb2.ScheduleDefinition, **given: Any) -> None:
    """Put what was given into a definition."""
    for name, value in given.items():
        if value is None:
            continue
        if name == "labels":
            definition.labels.clear()
            definition.labels.update(labels_of(list(filter(None, value))))
        elif name == "overlap":
            definition.overlap = schedule_pb2.ScheduleOverlap.Value(f"SCHEDULE_OVERLAP_{value.name}")
        elif not value:
            definition.ClearField(name)  # type: ignore[arg-type]  # a field of it
        elif name in _TIMES:
            getattr(definition, name).CopyFrom(time_of(value, name))
        else:
            setattr(definition, name, seconds_of(value, name) if name in _SECONDS else value)


def _say(console: Console, schedule: schedule_pb2.Schedule) -> None:
    line = f"{schedule.definition.name}: {_when(schedule)}, next {_next(schedule)}"
    console.print(wording.clean(line), markup=False, soft_wrap=True)


def _row(schedule: schedule_pb2.Schedule) -> tuple[str, ...]:
    definition = schedule.definition
    return definition.name, _when(schedule), _next(schedule), wording.one_line(definition.text)


def _when(schedule: schedule_pb2.Schedule) -> str:
    definition = schedule.definition
    if definition.cron:
        words = f" ({schedule.cron_text})" if schedule.cron_text else ""
        return wording.one_line(f"{definition.cron} {definition.time_zone or 'UTC'}{words}", 160)
    offset = f", {definition.offset_seconds} s later" if definition.offset_seconds else ""
    return f"every {definition.interval_seconds} s{offset}"


def details(definition: schedule_pb2.ScheduleDefinition) -> list[str]:
    """Return a line for each thing that was chosen about a schedule beside its times and its text."""
    chosen = {
        "agent": definition.agent,
        "labels": labels_text(definition.labels),
        "conversation key": wording.one_line(definition.conversation_key),
        "overlap": definition.overlap and wording.value_name(schedule_pb2.ScheduleOverlap, definition.overlap),
        "jitter": definition.jitter_seconds and f"{definition.jitter_seconds} s",
        "from": definition.HasField("start_time") and wording.time_text(definition.start_time),
        "until": definition.HasField("end_time") and wording.time_text(definition.end_time),
        "catch-up": definition.catch_up_seconds and f"{definition.catch_up_seconds} s",
    }
    return [f"{name}: {value}" for name, value in chosen.items() if value]


def _next(schedule: schedule_pb2.Schedule) -> str:
    if schedule.HasField("pause_time"):
        return "paused"
    return wording.time_text(schedule.next_time) if schedule.HasField("next_time") else "never"


def paused_lines(starter: schedule_pb2.Schedule | trigger_pb2.Trigger) -> list[str]:
    """Return who has paused a schedule or a trigger, since when and why; nothing of one that goes on."""
    if not starter.HasField("pause_time"):
        return []
    by = "by itself" if starter.self_paused else "by its user"
    note = f": {wording.one_line(starter.pause_note, 300)}" if starter.pause_note else ""
    return [f"paused {by} since {wording.time_text(starter.pause_time)}{note}"]


def fire_text(fire: schedule_pb2.ScheduleFire) -> str:
    """Return a line that tells a fire."""
    outcome = wording.value_name(schedule_pb2.ScheduleFireOutcome, fire.outcome)
    by = "triggered" if fire.triggered else wording.one_line(fire.event_id, 64) or "due"
    state = f" ({wording.state_name(fire.run_state)})" if fire.run_state else ""
    parts = (f"{by} {wording.time_text(fire.due_time)}  {outcome}", fire.run_id + state, wording.clean(fire.reason))
    return "  ".join(filter(None, parts))
