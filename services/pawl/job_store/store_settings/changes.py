"""Checks and applies changes to settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from pawl.chassis.ids import StoreId, check_id
from pawl.errors import Conflict, InvalidField, ModelNotAllowed
from pawl.job_store.store_settings.rules import (
    FLOORS,
    LISTED_STORES_MAX,
    MODEL_SERVER,
    MODELS,
    PERCENT_MAX,
    AllSettings,
    Layer,
    Limit,
    Settings,
    Switch,
    SwitchState,
)
from pawl.values import Feature

_MODELS_MAX: Final = 200
_MODEL_CHARACTERS_MAX: Final = 256


def updated(requested: Settings, unset: Collection[str], current: AllSettings, now: datetime) -> Settings:
    """Return the layer after setting the values in `requested` and removing the values in `unset` at `now`.

    Increases the version by one.

    Raises:
        Conflict: The version of `requested` is not the current one.
        InvalidField: A name is unknown, or a value is out of range.
    """
    stored, limits = current.layer(requested.layer, requested.store_id), requested.limits
    switches = {name: replace(switch, set_time=now) for name, switch in requested.switches.items()}
    if requested.version != stored.version:
        by = f" by {stored.update_user_id}" if stored.update_user_id else ""
        raise Conflict(f"the settings were changed{by}, so version {requested.version} is outdated: read them again")
    _check_names(switches, Feature, "settings.switches")
    _check_names(limits, Limit, "settings.limits")
    for name in unset:
        _check_names([name], [*Feature, *Limit, MODELS, MODEL_SERVER], "unset")
        if name not in stored.texts:
            raise InvalidField(f"{name!r} is not set in the layer {stored.layer.name}", field="unset")
        if name in requested.texts:
            raise InvalidField(f"{name!r} cannot be set and unset in the same request", field="unset")
    if switches and stored.layer is not Layer.DEPLOYMENT:
        raise InvalidField("switches can be set only for all stores, by a deployment key", field="settings.switches")
    for name, switch in switches.items():
        _check_switch(name, switch)
    for name, value in limits.items():
        field = f"settings.limits.{name}"
        maximum = Limit(name).maximum
        if not 1 <= value <= maximum:
            raise InvalidField(f"{name} must be between 1 and {maximum}, got {value}", field=field)
        if stored.layer is Layer.STORE:
            _check_own(Limit(name), value, current, stored.store_id)
    _check_models(requested, current)
    after = replace(
        stored,
        models=requested.models or (() if MODELS in unset else stored.models),
        model_server=requested.model_server or ("" if MODEL_SERVER in unset else stored.model_server),
        version=stored.version + 1,
        update_time=now,
        switches={name: value for name, value in {**stored.switches, **switches}.items() if name not in unset},
        limits={name: value for name, value in {**stored.limits, **limits}.items() if name not in unset},
    )
    for name, least in FLOORS.items():
        if after.layer is not Layer.STORE and not limits.keys().isdisjoint({name, least}):
            ceiling = current.with_layer(after).ceiling(name, after.store_id)
            if ceiling.layer is not None:
                _check_floor(name, ceiling.value, current.with_layer(after), after.store_id)
    return after


def _check_own(name: Limit, value: int, current: AllSettings, store_id: StoreId) -> None:
    """Check a limit that a store's admins set."""
    field = f"settings.limits.{name}"
    if name in FLOORS.values():
        raise InvalidField(f"{name} can be set only by a deployment key", field=field)
    ceiling = current.ceiling(name, store_id).value
    if value > ceiling:
        raise InvalidField(f"{name} must be at most {ceiling}, the store's ceiling, got {value}", field=field)
    _check_floor(name, value, current, store_id)


def _check_floor(name: Limit, value: int, current: AllSettings, store_id: StoreId) -> None:
    floor = current.floor(name, store_id)
    if floor is not None and value < floor.value:
        text = f"{name} must be at least {floor.value}, the value of {floor.name}, got {value}"
        raise InvalidField(text, field=f"settings.limits.{name}")


def _check_names(names: Collection[str], known: Iterable[str], field: str) -> None:
    for name in names:
        if name not in (every := list(known)):
            raise InvalidField(f"{name!r} is unknown: use one of {', '.join(every)}", field=field)


def _check_models(requested: Settings, current: AllSettings) -> None:
    if len(requested.models) > _MODELS_MAX:
        text = f"models must have at most {_MODELS_MAX} entries, got {len(requested.models)}"
        raise InvalidField(text, field="settings.models")
    if requested.model_server and requested.layer is Layer.STORE:
        raise InvalidField("model_server can be set only by a deployment key", field="settings.model_server")
    check_id(requested.model_server, "settings.model_server", optional=True)
    allowed = current.allowed_models(requested.store_id) if requested.layer is Layer.STORE else ()
    for name in requested.models:
        if not 0 < len(name) <= _MODEL_CHARACTERS_MAX or not name.isprintable():
            text = f"a model's name must have 1 to {_MODEL_CHARACTERS_MAX} printable characters, got {name!r}"
            raise InvalidField(text, field="settings.models")
        if allowed and name not in allowed:
            raise ModelNotAllowed(f"this store may not use the model {name!r}", model=name)


def check_model_server(name: str, known: Collection[str]) -> None:
    """Check that an agent-loop has this model server. Accept any name until one has reported its servers."""
    if known and name not in known:
        text = f"the model server {name!r} is not in agent-loop's limits file: use {', '.join(sorted(known))}"
        raise InvalidField(text, field="settings.model_server")


def _check_switch(name: str, switch: Switch) -> None:
    field = f"settings.switches.{name}"
    if switch.percent > PERCENT_MAX:
        raise InvalidField(f"percent must be at most {PERCENT_MAX}, got {switch.percent}", field=f"{field}.percent")
    if switch.percent and switch.state is not SwitchState.PERCENT:
        raise InvalidField("percent requires the state PERCENT", field=f"{field}.percent")
    if switch.store_ids and switch.state not in {SwitchState.LISTED, SwitchState.PERCENT}:
        raise InvalidField("store_ids require the state LISTED or PERCENT", field=f"{field}.store_ids")
    if switch.state is SwitchState.LISTED and not switch.store_ids:
        raise InvalidField("the state LISTED requires store_ids", field=f"{field}.store_ids")
    if len(switch.store_ids) > LISTED_STORES_MAX:
        raise InvalidField(
            f"store_ids must have at most {LISTED_STORES_MAX} entries, got {len(switch.store_ids)}",
            field=f"{field}.store_ids",
        )
    for store_id in switch.store_ids:
        check_id(store_id, f"{field}.store_ids")
    if switch.cancel_open_runs and name != Feature.RUNS:
        raise InvalidField("only the switch runs can cancel open runs", field=f"{field}.cancel_open_runs")
