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
AllStores = Annotated[
    bool, typer.Option("--all-stores", help="Set the limit for all stores. Requires a deployment key.")
]
CeilingOf = Annotated[
    str, typer.Option("--ceiling-of", metavar="STORE", help="Set a store's ceiling. Requires a deployment key.")
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
    stores: Annotated[
        list[str] | None, typer.Option("--store-id", help="For a switch: a store in which it is on. Repeatable.")
    ] = None,
    cancel_open_runs: Annotated[
        bool, typer.Option("--cancel-open-runs", help="For the switch `runs`: also cancel open runs where it is off.")
    ] = False,
    all_stores: AllStores = False,
    ceiling_of: CeilingOf = "",
) -> None:
    """Set a switch or another value. Only switches apply to all stores by default, others to your own store."""
    if _NUMBER.fullmatch(value) or name in _TEXTS:
        if stores or cancel_open_runs:
            raise CommandError("--store-id and --cancel-open-runs apply only to switches.")
        requested = {name: _TEXTS[name](value)} if name in _TEXTS else {"limits": {name: int(value)}}
        await _update(
            target, console, _layer(all_stores=all_stores, ceiling_of=ceiling_of), ceiling_of, name, **requested
        )
        return
    if all_stores or ceiling_of:
        raise CommandError("--all-stores and --ceiling-of do not apply to switches, which are always for all stores.")
    switch = pb.Switch(store_ids=stores, cancel_open_runs=cancel_open_runs)
    if _NUMBER.fullmatch(value.removesuffix("%")):
        switch.state, switch.percent = pb.SWITCH_STATE_PERCENT, min(int(value.removesuffix("%")), 2**32 - 1)
    elif value in _STATES:
        switch.state = _STATES[value]
    else:
        raise CommandError(f"{value!r} is not valid: use on, off, listed, a percentage such as 10%, or a number.")
    await _update(target, console, pb.SETTINGS_LAYER_DEPLOYMENT, "", name, switches={name: switch})


@app.command()
@command(service="keys")
async def unset(
    target: AsyncClient,
    console: Console,
    name: Name,
    *,
    all_stores: AllStores = False,
    ceiling_of: CeilingOf = "",
) -> None:
    """Remove a value, so that the next layer decides."""
    layer = _layer(all_stores=all_stores or name in list(Feature), ceiling_of=ceiling_of)
    await _update(target, console, layer, ceiling_of, name, unset=[name])


def _layer(*, all_stores: bool, ceiling_of: str) -> pb.SettingsLayer.ValueType:
    if all_stores and ceiling_of:
        raise CommandError("--all-stores and --ceiling-of cannot be used together.")
    if all_stores:
        return pb.SETTINGS_LAYER_DEPLOYMENT
    return pb.SETTINGS_LAYER_CEILING if ceiling_of else pb.SETTINGS_LAYER_STORE


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
    store_id: Annotated[str, typer.Option("--in-store", help="A store; by default your own.")] = "",
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
        {"--in-store": "store_id"},
        "List the changes of settings, newest last.",
        {"change": "change", "time": "time", "layer": _set_by, "store": "store_id", "by": "user_id", "what": _changed},
        none="There are no changes.",
        count=50,
        newest_last=True,
    )
)
