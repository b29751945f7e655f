"""Feature switches and store limits, and the layer that determines each value (LOOP-14, RES-3)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL, Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import CredentialId, StoreId, UserId, check_id
from pawl.errors import InvalidField, PermissionDenied
from pawl.values import TOKENS_MAX, Feature, WaitKind

RUNS_MAX: Final = 10_000
# Limits how long a store waits while another has its turns.
_WEIGHT_MAX: Final = 100
LISTED_STORES_MAX: Final = 10_000
PERCENT_MAX: Final = 100
# All replicas have read a change after this time.
_SPREAD: Final = timedelta(seconds=10)
MODELS: Final = "models"
MODEL_SERVER: Final = "model_server"
_DEFAULT_SERVER: Final = "default"
_NOT_SET: Final = "No layer sets it."
# Store id of the layer DEPLOYMENT.
ALL_STORES: Final = StoreId("")


class Limit(StrEnum):
    ACTIVE_RUNS = "active_runs"
    ACTIVE_RUNS_PER_USER = "active_runs_per_user"
    BACKGROUND_RUNS = "background_runs"
    DAILY_TOKENS = "daily_tokens"
    MONTHLY_TOKENS = "monthly_tokens"
    DAILY_TOKENS_PER_USER = "daily_tokens_per_user"
    MONTHLY_TOKENS_PER_USER = "monthly_tokens_per_user"
    MODEL_REQUESTS_PER_MINUTE = "model_requests_per_minute"
    MODEL_TOKENS_PER_MINUTE = "model_tokens_per_minute"
    ROUNDS_MAX = "rounds_max"
    CALLS_PER_ROUND_MAX = "calls_per_round_max"
    MODEL_ATTEMPTS_MAX = "model_attempts_max"
    AGENT_DEPTH_MAX = "agent_depth_max"
    TOTAL_TOKENS_MAX = "total_tokens_max"
    TOOL_TIMEOUT_SECONDS = "tool_timeout_seconds"
    ROUND_TIMEOUT_SECONDS = "round_timeout_seconds"
    RUN_TIMEOUT_SECONDS = "run_timeout_seconds"
    PROVIDER_WAIT_SECONDS = "provider_wait_seconds"
    STORED_BYTES = "stored_bytes"
    EVENTS_PER_SECOND = "events_per_second"
    CONVERSATION_RETENTION_DAYS = "conversation_retention_days"
    CONVERSATION_RETENTION_DAYS_MIN = "conversation_retention_days_min"
    WEIGHT = "weight"

    @property
    def has_default(self) -> bool:
        """True if the limit has a value even if no layer sets it.

        A limit without a default applies only once a layer sets it.
        """
        return self in {
            *(Limit.ACTIVE_RUNS, Limit.ACTIVE_RUNS_PER_USER, Limit.BACKGROUND_RUNS, Limit.WEIGHT),
            *(Limit.CONVERSATION_RETENTION_DAYS, Limit.CONVERSATION_RETENTION_DAYS_MIN),
        }

    @property
    def maximum(self) -> int:
        """The highest allowed value. For a limit without a default, this value means that there is no limit."""
        if self is Limit.WEIGHT:
            return _WEIGHT_MAX
        return RUNS_MAX if self.has_default else TOKENS_MAX


# Limits that a run has from its start.
RUN_LIMITS: Final = [
    *(Limit.ROUNDS_MAX, Limit.CALLS_PER_ROUND_MAX, Limit.MODEL_ATTEMPTS_MAX, Limit.AGENT_DEPTH_MAX),
    *(Limit.TOTAL_TOKENS_MAX, Limit.TOOL_TIMEOUT_SECONDS, Limit.ROUND_TIMEOUT_SECONDS),
    *(Limit.RUN_TIMEOUT_SECONDS, Limit.PROVIDER_WAIT_SECONDS),
]
# The lowest values of limits, which only deployment keys set.
FLOORS: Final[Mapping[Limit, Limit]] = {Limit.CONVERSATION_RETENTION_DAYS: Limit.CONVERSATION_RETENTION_DAYS_MIN}
# What a run waits for once the tokens are used up.
TOKEN_LIMITS: Final[Mapping[Limit, WaitKind]] = {
    Limit.DAILY_TOKENS: WaitKind.STORE_DAILY_TOKENS,
    Limit.MONTHLY_TOKENS: WaitKind.STORE_MONTHLY_TOKENS,
    Limit.DAILY_TOKENS_PER_USER: WaitKind.USER_DAILY_TOKENS,
    Limit.MONTHLY_TOKENS_PER_USER: WaitKind.USER_MONTHLY_TOKENS,
}


class Layer(IntEnum):
    DEPLOYMENT = 1
    CEILING = 2
    STORE = 3


class SwitchState(IntEnum):
    OFF = 1
    LISTED = 2
    PERCENT = 3
    ALL = 4


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    state: SwitchState
    store_ids: frozenset[str] = frozenset()
    percent: int = 0
    cancel_open_runs: bool = False
    set_time: datetime | None = None

    def __str__(self) -> str:
        count = len(self.store_ids)
        stores = "1 listed store" if count == 1 else f"{count} listed stores"
        match self.state:
            case SwitchState.OFF:
                text = "off"
            case SwitchState.LISTED:
                text = f"on for {stores}"
            case SwitchState.PERCENT:
                text = f"on for {self.percent} % of stores" + (f" and {stores}" if self.store_ids else "")
            case SwitchState.ALL:
                text = "on"
        return f"{text}, cancels open runs" if self.cancel_open_runs else text


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Values that one layer has set. `version` is 0 if the layer has never set any."""

    layer: Layer
    store_id: StoreId = ALL_STORES
    version: int = 0
    switches: Mapping[str, Switch] = {}
    limits: Mapping[str, int] = {}
    models: tuple[str, ...] = ()
    model_server: str = ""
    update_time: datetime | None = None
    update_user_id: UserId = UserId("")
    update_credential_id: CredentialId = CredentialId("")

    @property
    def texts(self) -> dict[str, str]:
        """The values by name, as text for the list of changes."""
        texts = {name: str(value) for name, value in {**self.switches, **self.limits}.items()}
        named = {MODELS: ", ".join(self.models), MODEL_SERVER: self.model_server}
        return texts | {name: text for name, text in named.items() if text}


class EffectiveValue(msgspec.Struct, frozen=True, kw_only=True):
    """A value that applies to a store, and the layer that determines it.

    If no layer sets the value, the layer is None.
    """

    name: str
    value: int = 0
    text: str = ""
    layer: Layer | None
    reason: str

    @property
    def shown(self) -> str:
        if self.name in list(Feature):
            return "on" if self.value else "off"
        return self.text or (str(self.value) if self.is_set else "unlimited")

    @property
    def is_set(self) -> bool:
        """True if a layer or the process has set the value. Otherwise, there is no limit."""
        return self.name not in list(Limit) or Limit(self.name).has_default or self.value < TOKENS_MAX


def is_on(feature: Feature, switch: Switch, store_id: StoreId) -> bool:
    if switch.state in {SwitchState.OFF, SwitchState.ALL}:
        return switch.state is SwitchState.ALL
    if store_id in switch.store_ids:
        return True
    return switch.state is SwitchState.PERCENT and _hundredth(feature, store_id) < switch.percent


def _hundredth(feature: Feature, store_id: StoreId) -> float:
    """Return a number in [0, 100) that depends only on the feature and the store."""
    digest = hashlib.sha256(f"{feature}\n{store_id}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 * PERCENT_MAX


class AllSettings:
    """All layers of all stores. `started_with` contains the limits that were set when the process started.

    Features in `forced_off` are disabled in all stores.
    """

    def __init__(
        self, layers: Collection[Settings], started_with: Mapping[Limit, int], forced_off: Collection[Feature] = ()
    ) -> None:
        self._layers = {(each.layer, each.store_id): each for each in layers}
        self._started_with = started_with
        self._forced_off = frozenset(forced_off)

    def with_layer(self, changed: Settings) -> AllSettings:
        layers = {**self._layers, (changed.layer, changed.store_id): changed}
        return AllSettings(layers.values(), self._started_with, self._forced_off)

    def layer(self, layer: Layer, store_id: StoreId) -> Settings:
        return self._layers.get((layer, store_id)) or Settings(layer=layer, store_id=store_id)

    def switch(self, feature: Feature, store_id: StoreId) -> EffectiveValue:
        """Return whether a feature is enabled in a store, as 1 or 0."""
        if feature in self._forced_off:
            return EffectiveValue(name=feature, value=0, layer=None, reason="Switched off when the process started.")
        switch = self.layer(Layer.DEPLOYMENT, ALL_STORES).switches.get(feature)
        if switch is None:
            return EffectiveValue(name=feature, value=1, layer=None, reason=_NOT_SET)
        return EffectiveValue(
            name=feature,
            value=int(is_on(feature, switch, store_id)),
            layer=Layer.DEPLOYMENT,
            reason=f"The switch is {switch}.",
        )

    def limit(self, name: Limit, store_id: StoreId) -> EffectiveValue:
        """Return the limit of a store: the value that its admins have set, kept between the floor and the ceiling."""
        limit = self._below_ceiling(name, store_id)
        floor = self.floor(name, store_id)
        if floor is None or limit.value >= floor.value:
            return limit
        return replace(floor, name=name, reason=f"{floor.reason} {name} would be {limit.value}, below this floor.")

    def floor(self, name: Limit, store_id: StoreId) -> EffectiveValue | None:
        return self.ceiling(FLOORS[name], store_id) if name in FLOORS else None

    def _below_ceiling(self, name: Limit, store_id: StoreId) -> EffectiveValue:
        ceiling = self.ceiling(name, store_id)
        requested = self.layer(Layer.STORE, store_id).limits.get(name)
        if requested is None:
            return ceiling
        if requested > ceiling.value:
            return replace(
                ceiling, reason=f"{ceiling.reason} The store's own limit of {requested} is above this ceiling."
            )
        return EffectiveValue(
            name=name,
            value=requested,
            layer=Layer.STORE,
            reason="Set by the store's admins" + (f"; the ceiling is {ceiling.value}." if ceiling.is_set else "."),
        )

    def ceiling(self, name: Limit, store_id: StoreId) -> EffectiveValue:
        reasons = {Layer.CEILING: "Set for this store by a deployment key.", Layer.DEPLOYMENT: "Set for all stores."}
        for layer, reason in reasons.items():
            set_in = self.layer(layer, store_id if layer is Layer.CEILING else ALL_STORES)
            if name in set_in.limits:
                return EffectiveValue(name=name, value=set_in.limits[name], layer=layer, reason=reason)
        if not name.has_default:
            reason = "Only agent-loop's limits file applies." if name in RUN_LIMITS else _NOT_SET
            return EffectiveValue(name=name, value=name.maximum, layer=None, reason=reason)
        started = self._started_with[name]
        return EffectiveValue(name=name, value=started, layer=None, reason="Set when the process started.")

    def off(self, store_id: StoreId) -> frozenset[Feature]:
        return frozenset(feature for feature in Feature if not self.switch(feature, store_id).value)

    def explained(self, store_id: StoreId) -> Sequence[EffectiveValue]:
        switches = [self.switch(feature, store_id) for feature in Feature]
        models, server = self.models(store_id), self._model_server(store_id)
        allowed = EffectiveValue(
            name=MODELS,
            text=", ".join(models) or "all",
            layer=next((each.layer for each in self._of(store_id) if each.models), None),
            reason="All other models are refused." if models else _NOT_SET,
        )
        return [*switches, *(self.limit(name, store_id) for name in Limit), allowed, server]

    def _of(self, store_id: StoreId) -> Sequence[Settings]:
        """Return the layers of a store, starting with its own."""
        return [self.layer(each, ALL_STORES if each is Layer.DEPLOYMENT else store_id) for each in reversed(Layer)]

    def allowed_models(self, store_id: StoreId) -> Sequence[str]:
        """Return the models that the deployment allows in a store, or an empty sequence if it allows all."""
        _, *above = self._of(store_id)
        return next((each.models for each in above if each.models), ())

    def models(self, store_id: StoreId) -> Sequence[str]:
        """Return the models that a store may use, or an empty sequence if it may use all."""
        own, allowed = self.layer(Layer.STORE, store_id).models, self.allowed_models(store_id)
        if own and allowed:
            # If the deployment no longer allows any of the store's models, its own list is void.
            return [each for each in own if each in allowed] or allowed
        return own or allowed

    def _server(self, store_id: StoreId) -> Settings | None:
        return next((each for each in self._of(store_id) if each.model_server), None)

    def server(self, store_id: StoreId) -> str:
        """Return the name of a store's model server, or an empty string for the default server."""
        set_in = self._server(store_id)
        name = set_in.model_server if set_in is not None else ""
        return "" if name == _DEFAULT_SERVER else name

    def _model_server(self, store_id: StoreId) -> EffectiveValue:
        set_in = self._server(store_id)
        if set_in is None:
            return EffectiveValue(name=MODEL_SERVER, text=_DEFAULT_SERVER, layer=None, reason=_NOT_SET)
        return EffectiveValue(
            name=MODEL_SERVER, text=set_in.model_server, layer=set_in.layer, reason="Set by a deployment key."
        )

    @property
    def runs_set_time(self) -> datetime | None:
        """Return when the switch for runs was last set."""
        switch = self.layer(Layer.DEPLOYMENT, ALL_STORES).switches.get(Feature.RUNS)
        return None if switch is None else switch.set_time

    @property
    def cancels_before(self) -> datetime | None:
        """Return the creation time before which open runs must be cancelled because runs are disabled."""
        switch = self.layer(Layer.DEPLOYMENT, ALL_STORES).switches.get(Feature.RUNS)
        is_forced = Feature.RUNS in self._forced_off
        if switch is None or switch.set_time is None or not switch.cancel_open_runs or is_forced:
            return None
        return switch.set_time + _SPREAD


def with_usage(
    effective: EffectiveValue, used: Mapping[WaitKind, tuple[int, datetime]], *, of_user: bool
) -> EffectiveValue:
    """Return a token budget whose explanation also states how much of it is used, and when its day or month ends.

    Budgets of users are explained only with `of_user`, which means that `used` contains the caller's tokens in the
    store.
    """
    kind = next((each for name, each in TOKEN_LIMITS.items() if name == effective.name), None)
    if kind is None or not effective.is_set or ("user" in effective.name and not of_user):
        return effective
    tokens, end_time = used[kind]
    whose = "You have" if "user" in effective.name else "The store has"
    text = f"used {tokens} tokens. A new period starts" if tokens < effective.value else "used it up. It is renewed"
    return replace(effective, reason=f"{effective.reason} {whose} {text} at {end_time:%Y-%m-%d %H:%M} UTC.")


def with_size(effective: EffectiveValue, stored_bytes: int) -> EffectiveValue:
    if effective.name != Limit.STORED_BYTES:
        return effective
    return replace(effective, reason=f"{effective.reason} The store has {stored_bytes} bytes of conversations.")


def governs_all(caller: Principal) -> bool:
    """Return whether the caller may change the settings of all stores.

    Only deployment keys and the owner of the local key may.
    """
    is_owner = caller.credential_id == LOCAL_CREDENTIAL and Role.ADMIN in caller.roles
    return Role.DEPLOYMENT in caller.roles or is_owner


def layer_of(caller: Principal, layer: Layer, store_id: str, *, writes: bool = False) -> StoreId:
    """Return the store whose layer is requested, by default the caller's own store.

    Raises:
        PermissionDenied: The caller may not read the layer or, with `writes`, change it.
        InvalidField: The request names a store for the layer DEPLOYMENT, or no store for another layer.
        InvalidId: The store id is malformed.
    """
    if writes and layer is Layer.STORE and Role.ADMIN not in caller.roles:
        raise PermissionDenied("changing the layer STORE requires the admin role in the store")
    needs_deployment = layer is Layer.DEPLOYMENT or (writes and layer is Layer.CEILING)
    if needs_deployment and not governs_all(caller):
        raise PermissionDenied(
            f"{'changing' if writes else 'reading'} the layer {layer.name} requires a deployment key"
        )
    if layer is not Layer.DEPLOYMENT:
        return store_of(caller, store_id)
    if store_id:
        raise InvalidField("the layer DEPLOYMENT applies to all stores: leave store_id empty", field="store_id")
    return ALL_STORES


def store_of(caller: Principal, store_id: str) -> StoreId:
    """Return the requested store, by default the caller's own store.

    Raises:
        PermissionDenied: The request names another store, and the caller has no deployment key.
        InvalidField: The caller has a deployment key, and the request names no store.
        InvalidId: The store id is malformed.
    """
    named = check_id(store_id, "store_id", optional=True) or caller.store_id
    if named != caller.store_id and not governs_all(caller):
        raise PermissionDenied("another store's settings require a deployment key")
    if not named:
        raise InvalidField("store_id is required with a deployment key", field="store_id")
    return StoreId(named)
