"""Implements `pawl schedules` and `pawl triggers`, which start runs automatically."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import typer

from pawl.agent.v1 import schedule_pb2 as schedule_requests
from pawl.agent.v1 import trigger_pb2 as trigger_requests
from pawl.cli import wording
from pawl.cli.command import object_of, seconds_of
from pawl.cli.contract import Option, Options, listing, shown, verb
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.event.v1 import schedule_pb2, trigger_pb2

_NAME: Final = {"name": "name"}
_PAUSE: Final = {**_NAME, "--note": "note"}
_UPDATE: Final = "Change the given options; '' removes a value. New runs use the permissions of your key."


def _every(definition: schedule_pb2.ScheduleDefinition, typed: str) -> None:
    definition.cron = definition.time_zone = ""
    definition.interval_seconds = seconds_of(typed or "0s", "interval_seconds")


def _cron(definition: schedule_pb2.ScheduleDefinition, typed: str) -> None:
    definition.interval_seconds = definition.offset_seconds = 0
    definition.cron = typed


def _input(definition: Any, typed: str) -> None:
    definition.input_json = msgspec.json.encode(object_of(typed, "--input")) if typed else b""


_INPUT: Final = Option(path="definition.input_json", help="The workflow's input, a JSON object.", put=_input)
_SCHEDULE: Final[Options] = {
    "name": "definition.name",
    "--text": "definition.text",
    "--cron": Option(path="definition.cron", put=_cron),
    "--zone": "definition.time_zone",
    "--every": Option(
        path="definition.interval_seconds",
        help="Interval: 30s, 15m, 2h or 7d.",
        put=_every,
        excludes="--cron",
    ),
    "--offset": "definition.offset_seconds",
    "--jitter": "definition.jitter_seconds",
    "--start": "definition.start_time",
    "--end": "definition.end_time",
    "--overlap": "definition.overlap",
    "--catch-up": "definition.catch_up_seconds",
    "--agent": "definition.agent",
    "--workflow": "definition.workflow",
    "--input": _INPUT,
    "--conversation-key": "definition.conversation_key",
    "--label": "definition.labels",
}


def _when(schedule: schedule_pb2.Schedule) -> str:
    definition = schedule.definition
    if definition.cron:
        words = f" ({schedule.cron_text})" if schedule.cron_text else ""
        return wording.one_line(f"{definition.cron} {definition.time_zone or 'UTC'}{words}", 160)
    offset = f", offset {definition.offset_seconds} s" if definition.offset_seconds else ""
    return f"every {definition.interval_seconds} s{offset}"


def _next(schedule: schedule_pb2.Schedule) -> str:
    return "paused" if schedule.HasField("pause_time") else wording.text_at(schedule, "next_time") or "never"


def _starts(starter: Any) -> str:
    definition = starter.definition
    return wording.one_line(f"workflow {definition.workflow}" if definition.workflow else definition.text, 200)


def _schedule(answer: Any, _: Any) -> str:
    schedule = answer.schedule
    due = _next(schedule) if schedule.HasField("pause_time") else f"next {_next(schedule)}"
    return wording.clean(f"{schedule.definition.name}: {_when(schedule)}, {due}")


def _fires(answer: Any, _: Any) -> list[str]:
    return [wording.summary(fire) for fire in _fires_of(answer)]


def _fires_of(answer: Any) -> list[schedule_pb2.ScheduleFire]:
    return [answer.fire] if isinstance(answer, schedule_requests.TriggerScheduleResponse) else list(answer.fires)


def _has_started(answer: Any) -> bool:
    started = {schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED, schedule_pb2.SCHEDULE_FIRE_OUTCOME_WAITING}
    return all(fire.outcome in started for fire in _fires_of(answer))


async def _current_schedule(target: AsyncClient, request: Any) -> None:
    request.definition.CopyFrom((await target.get_schedule(request.definition.name)).definition)


schedules = typer.Typer(help="Start runs at set times or intervals.", no_args_is_help=True)
schedules.command("create")(
    verb(
        schedule_requests.CreateScheduleRequest(),
        _SCHEDULE,
        "Create a schedule. Requires --text or --workflow, and --cron or --every.",
        _schedule,
    )
)
schedules.command("update")(
    verb(schedule_requests.UpdateScheduleRequest(), _SCHEDULE, _UPDATE, _schedule, before=_current_schedule)
)
schedules.command("list")(
    listing(
        schedule_requests.ListSchedulesRequest(),
        {},
        "List your schedules by name.",
        {"schedule": "definition.name", "when": _when, "next": _next, "starts": _starts},
        none="You have no schedules.",
    )
)
schedules.command("show")(
    verb(
        schedule_requests.GetScheduleRequest(),
        _NAME,
        "Show a schedule, its next 10 scheduled times and its last 20 firings.",
        shown,
    )
)
schedules.command("pause")(
    verb(
        schedule_requests.PauseScheduleRequest(),
        _PAUSE,
        "Pause a schedule. Scheduled times during the pause are skipped.",
        _schedule,
    )
)
schedules.command("resume")(
    verb(schedule_requests.ResumeScheduleRequest(), _NAME, "Resume a schedule with your key's permissions.", _schedule)
)
schedules.command("trigger")(
    verb(
        schedule_requests.TriggerScheduleRequest(),
        _NAME,
        "Fire a schedule now, even if it is paused.",
        _fires,
        succeeded=_has_started,
    )
)
schedules.command("backfill")(
    verb(
        schedule_requests.BackfillScheduleRequest(),
        {**_NAME, "--from": "begin_time", "--to": "end_time"},
        "Fire a schedule for up to 100 past scheduled times, even if it has already fired for them.",
        _fires,
        succeeded=_has_started,
    )
)
schedules.command("delete")(
    verb(
        schedule_requests.DeleteScheduleRequest(),
        _NAME,
        "Delete a schedule and its history. Its open runs continue.",
        "Deleted {name}.",
        confirmation="Delete the schedule {name}?",
    )
)


def _mailbox(mailbox: trigger_pb2.MailboxSource, typed: str) -> None:
    mailbox.username, _, address = typed.rpartition("@")
    host, colon, port = address.rpartition(":")
    if not mailbox.username or (colon and not port.isdecimal()):
        raise CommandError(
            f"{typed!r} is not a mailbox like ann@imap.example.com or ann@imap.example.com:993.", parameter="username"
        )
    mailbox.host, mailbox.port = (host, int(port)) if colon else (address, 0)


_TRIGGER: Final[Options] = {
    "name": "definition.name",
    "--text": "definition.text",
    "--webhook": "definition.webhook.authentication",
    "--mailbox": Option(
        path="definition.mailbox.username", help="The IMAP mailbox: user@host or user@host:port.", put=_mailbox
    ),
    "--plaintext/--tls": "definition.mailbox.plaintext",
    "--password-secret": "definition.mailbox.password_secret",
    "--folder": "definition.mailbox.folder",
    "--poll": "definition.mailbox.poll_seconds",
    "--authserv-id": "definition.mailbox.authserv_id",
    "--sender": "definition.mailbox.senders",
    "--overlap": "definition.overlap",
    "--debounce": "definition.debounce_seconds",
    "--conversation-key": "definition.conversation_key",
    "--conversation-pointer": "definition.conversation_pointer",
    "--concurrency-pointer": "definition.concurrency_pointer",
    "--agent": "definition.agent",
    "--workflow": "definition.workflow",
    "--input": _INPUT,
    "--label": "definition.labels",
}


def _source_text(trigger: trigger_pb2.Trigger) -> str:
    mailbox = trigger.definition.mailbox
    if trigger.definition.HasField("mailbox"):
        return wording.one_line(f"e-mails to {mailbox.username} at {mailbox.host}")
    return f"webhook ({wording.text_at(trigger, 'definition.webhook.authentication')})"


def _state(trigger: trigger_pb2.Trigger) -> str:
    refused = f", {trigger.refused_count} refused" if trigger.refused_count else ""
    if trigger.HasField("pause_time"):
        return f"paused{refused}"
    return "unreachable" if trigger.HasField("unreachable_time") else f"on{refused}"


def _trigger(answer: Any, _: Any) -> str:
    return wording.clean(f"{answer.trigger.definition.name}: {_source_text(answer.trigger)}, {_state(answer.trigger)}")


def _created(answer: Any, request: Any) -> str:
    name, is_webhook = request.definition.name, request.definition.HasField("webhook")
    if is_webhook and not answer.secret:
        raise CommandError(f"The trigger {name} already exists. `pawl triggers rotate {name}` creates a new secret.")
    return (
        f"Created {name} with webhook id {answer.trigger.trigger_id}. Its secret:"
        if is_webhook
        else _trigger(answer, request)
    )


async def _current_trigger(target: AsyncClient, request: Any) -> None:
    request.definition.CopyFrom((await target.get_trigger(request.definition.name)).definition)


triggers = typer.Typer(help="Start runs when a webhook or e-mail arrives.", no_args_is_help=True)
triggers.command("create")(
    verb(
        trigger_requests.CreateTriggerRequest(),
        _TRIGGER,
        "Create a trigger. Requires --text or --workflow, and --webhook or --mailbox. A webhook's secret is shown once,"
        " alone on standard output.",
        _created,
    )
)
triggers.command("update")(
    verb(trigger_requests.UpdateTriggerRequest(), _TRIGGER, _UPDATE, _trigger, before=_current_trigger)
)
triggers.command("list")(
    listing(
        trigger_requests.ListTriggersRequest(),
        {},
        "List your triggers by name.",
        {
            "trigger": "definition.name",
            "id": "trigger_id",
            "by": _source_text,
            "state": _state,
            "starts": _starts,
        },
        none="You have no triggers.",
    )
)
triggers.command("show")(
    verb(trigger_requests.GetTriggerRequest(), _NAME, "Show a trigger and its last 20 firings.", shown)
)
triggers.command("pause")(
    verb(
        trigger_requests.PauseTriggerRequest(),
        _PAUSE,
        "Pause a trigger. It accepts no new events; queued ones keep waiting.",
        _trigger,
    )
)
triggers.command("resume")(
    verb(trigger_requests.ResumeTriggerRequest(), _NAME, "Resume a trigger with your key's permissions.", _trigger)
)
triggers.command("rotate")(
    verb(
        trigger_requests.RotateTriggerSecretRequest(),
        _NAME,
        "Rotate a trigger's secret and print the new one. The old one stays valid for a day.",
        "New secret of {name}:",
    )
)
triggers.command("delete")(
    verb(
        trigger_requests.DeleteTriggerRequest(),
        _NAME,
        "Delete a trigger with its secrets, history and queued events. Its open runs continue.",
        "Deleted {name}.",
        confirmation="Delete the trigger {name}?",
    )
)
