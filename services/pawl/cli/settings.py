"""Implements `pawl settings`: feature switches and store limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command, say
from pawl.cli.contract import Columns, Json, listing, show_items, warn_of_set
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.settings.v1 import settings_pb2 as pb
from pawl.values import Feature

_STATES: Final = {
    "off": pb.SWITCH_STATE_OFF,
    "listed": pb.SWITCH_STATE_LISTED,
    "on": pb.SWITCH_STATE_ALL,
}

# A number that the contract's fields can hold.
_NUMBER: Final = re.compile("[0-9]{1,18}")
# How to read the values that are neither switches nor limits.
_TEXTS: Final[Mapping[str, Callable[[str], Any]]] = {
    "models": lambda value: [name.strip() for name in value.split(",")],
    "model_server": str,
}

Name = Annotated[str, typer.Argument(help="Name of a setting. `pawl settings explain` shows all.")]
Store = Annotated[str, typer.Option("--store", help="The store. Default: your own.")]
AllStores = Annotated[bool, typer.Option("--all-stores", help="For all stores. Requires a deployment key.")]
Ceiling = Annotated[
    bool,
    typer.Option("--ceiling", help="The store's ceiling, which its admins cannot exceed. Requires a deployment key."),
]

app = typer.Typer(
    help="Switch features on and off, and change store limits. Changes apply within five seconds.",
    no_args_is_help=True,
)


@app.command("set")
@command(service="keys")
async def set_value(
    target: AsyncClient,
    console: Console,
    name: Name,
    value: Annotated[
        str,
        typer.Argument(
            help="For a switch: on, off, listed, or a percentage of stores such as 10%. For a limit: a number. For"
            " models: their names, separated by commas. For model_server: its name."
        ),
    ],
    *,
    store_ids: Annotated[
        list[str] | None,
        typer.Option(
            "--store", help="The store; default: your own. For a switch, a store in which it is on. Repeatable."
        ),
    ] = None,
    cancel_open_runs: Annotated[
        bool, typer.Option("--cancel-open-runs", help="For the switch `runs`: also cancel open runs where it is off.")
    ] = False,
    all_stores: AllStores = False,
    ceiling: Ceiling = False,
) -> None:
    """Set a limit or another value of a store, or a switch, which always applies to all stores."""
    if name in list(Feature):
        if all_stores or ceiling:
            raise CommandError(
                f"{name} is a switch, which always applies to all stores. Omit --all-stores and --ceiling."
            )
        switch = _switch(name, value)
        switch.store_ids[:], switch.cancel_open_runs = store_ids or (), cancel_open_runs
        await _update(target, console, pb.SETTINGS_LAYER_DEPLOYMENT, "", name, switches={name: switch})
        return
    if cancel_open_runs:
        raise CommandError("--cancel-open-runs applies only to the switch runs.")
    if len(store_ids or ()) > 1:
        raise CommandError(f"Specify --store only once: {name} is not a switch.")
    store_id = store_ids[0] if store_ids else ""
    layer = _layer(store_id, all_stores=all_stores, ceiling=ceiling)
    if name in _TEXTS:
        await _update(target, console, layer, store_id, name, **{name: _TEXTS[name](value)})
    elif _NUMBER.fullmatch(value):
        await _update(target, console, layer, store_id, name, limits={name: int(value)})
    elif value in _STATES or value.endswith("%"):
        raise CommandError(f"There is no switch {name!r}. The switches are {', '.join(Feature)}.")
    else:
        raise CommandError(f"{name} must be a whole number of at most 18 digits, got {value[:40]!r}.")


@app.command()
@command(service="keys")
async def unset(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    store_id: Store = "",
    all_stores: AllStores = False,
    ceiling: Ceiling = False,
) -> None:
    """Remove a value, so that the next layer decides."""
    layer = _layer(store_id, all_stores=all_stores or name in list(Feature), ceiling=ceiling)
    await _update(target, console, layer, store_id, name, unset=[name])


def _switch(name: str, value: str) -> pb.Switch:
    if value.endswith("%") and _NUMBER.fullmatch(value[:-1]):
        return pb.Switch(state=pb.SWITCH_STATE_PERCENT, percent=min(int(value[:-1]), 2**32 - 1))
    if value in _STATES:
        return pb.Switch(state=_STATES[value])
    raise CommandError(f"{name} must be on, off, listed or a percentage such as 10%, got {value!r}.")


def _layer(store_id: str, *, all_stores: bool, ceiling: bool) -> pb.SettingsLayer.ValueType:
    if all_stores and (store_id or ceiling):
        raise CommandError("The value is for all stores: omit --store and --ceiling.")
    if all_stores:
        return pb.SETTINGS_LAYER_DEPLOYMENT
    return pb.SETTINGS_LAYER_CEILING if ceiling else pb.SETTINGS_LAYER_STORE


async def _update(
    target: AsyncClient,
    console: Console,
    layer: pb.SettingsLayer.ValueType,
    store_id: str,
    name: str,
    *,
    unset: list[str] | None = None,
    **requested: Any,
) -> None:
    read = pb.GetSettingsRequest(layer=layer, store_id=store_id)
    current = (await target.again(target.settings.GetSettings, read)).settings
    settings = pb.Settings(layer=layer, store_id=store_id, version=current.version, **requested)
    request = pb.UpdateSettingsRequest(settings=settings, unset=unset)
    await warn_of_set(target, request, await target.settings.UpdateSettings(request))
    say(console, f"{'Removed' if unset else 'Set'} {name}. It applies within five seconds.", "green")


@app.command()
@command(service="keys")
async def explain(
    target: AsyncClient,
    console: Console,
    *,
    store_id: Store = "",
    json: Json = False,
) -> None:
    """Show the values that apply to a store, and why."""
    requested = pb.ExplainSettingsRequest(store_id=store_id)
    found = (await target.again(target.settings.ExplainSettings, requested)).explanations
    columns: Columns = {"name": "name", "value": "value", "set by": _set_by, "why": "reason"}
    show_items(console, found, columns, none="", json=json)


def _set_by(item: Any) -> str:
    return wording.short_name(pb.SettingsLayer.DESCRIPTOR, item.layer) if item.layer else ""


def _changed(change: Any) -> str:
    names = sorted({*change.before, *change.after})
    values = [(name, change.before.get(name, "not set"), change.after.get(name, "not set")) for name in names]
    return wording.clean("; ".join(f"{name}: {before} -> {after}" for name, before, after in values))


app.command("changes")(
    listing(
        pb.ListSettingsChangesRequest(),
        {"--store": "store_id"},
        "List the changes to settings, newest last.",
        {"change": "change", "time": "time", "layer": _set_by, "store": "store_id", "by": "user_id", "what": _changed},
        none="There are no changes.",
        count=50,
        newest_last=True,
    )
)
