"""Rules of settings: which stores a switch includes, which layer decides, and who may change what (LOOP-14, RES-3)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL, Principal, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import Conflict, InvalidField, ModelNotAllowed, PawlError, PermissionDenied
from pawl.job_store.store_settings.changes import updated
from pawl.job_store.store_settings.rules import (
    ALL_STORES,
    AllSettings,
    Layer,
    Limit,
    Settings,
    Switch,
    SwitchState,
    is_on,
    layer_of,
    store_of,
)
from pawl.values import Feature

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STARTED_WITH = {Limit.ACTIVE_RUNS: 20, Limit.ACTIVE_RUNS_PER_USER: 5, Limit.BACKGROUND_RUNS: 100}
STARTED_WITH |= {Limit.CONVERSATION_RETENTION_DAYS: 30, Limit.CONVERSATION_RETENTION_DAYS_MIN: 1}
ACME = StoreId("acme")
stores = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True).map(StoreId)
features = st.sampled_from(Feature)


def settings(*layers: Settings, forced_off: frozenset[Feature] = frozenset()) -> AllSettings:
    return AllSettings(layers, STARTED_WITH, forced_off)


def deployment(**switches: Switch) -> Settings:
    return Settings(layer=Layer.DEPLOYMENT, switches=switches)


def caller(*roles: str, store: str = "acme", credential: str = "key_1") -> Principal:
    return user_principal(StoreId(store), UserId("ann"), frozenset(roles), credential_id=CredentialId(credential))


@given(features, stores, st.integers(0, 100), st.integers(0, 100), st.frozensets(stores, max_size=3))
def test_a_higher_percentage_includes_the_stores_of_a_lower_one_and_all_listed_stores(
    feature: Feature, store: StoreId, one: int, other: int, listed: frozenset[str]
) -> None:
    low, high = sorted((one, other))
    switches = [Switch(state=SwitchState.PERCENT, percent=percent, store_ids=listed) for percent in (low, high)]
    on_low, on_high = (is_on(feature, switch, store) for switch in switches)
    assert on_high or not on_low
    assert on_low or store not in listed
    assert is_on(feature, Switch(state=SwitchState.PERCENT, percent=100), store)
    assert not is_on(feature, Switch(state=SwitchState.OFF, store_ids=frozenset({store})), store)


def test_a_percentage_selects_about_that_share_of_stores_and_different_ones_for_each_feature() -> None:
    tenth = Switch(state=SwitchState.PERCENT, percent=10)
    on = {
        feature: {number for number in range(5000) if is_on(feature, tenth, StoreId(f"store-{number}"))}
        for feature in (Feature.RUNS, Feature.BACKGROUND)
    }
    assert all(400 < len(found) < 600 for found in on.values())
    assert len(on[Feature.RUNS] & on[Feature.BACKGROUND]) < 100


def test_a_feature_that_is_forced_off_is_off_whatever_the_switch_says() -> None:
    found = settings(deployment(runs=Switch(state=SwitchState.ALL)), forced_off=frozenset({Feature.RUNS}))
    assert ({*found.off(ACME)}, {*settings().off(ACME)}) == ({Feature.RUNS}, set())


@pytest.mark.parametrize(
    ("deployed", "ceiling", "asked", "value", "layer"),
    [
        (None, None, None, 20, None),
        (30, None, None, 30, Layer.DEPLOYMENT),
        (30, 50, None, 50, Layer.CEILING),
        (30, 50, 40, 40, Layer.STORE),
        (30, None, 40, 30, Layer.DEPLOYMENT),
        (None, None, 25, 20, None),
        (None, None, 1, 1, Layer.STORE),
    ],
)
def test_a_stores_ceiling_replaces_the_deployments_limit_and_caps_its_admins_limit(
    deployed: int | None, ceiling: int | None, asked: int | None, value: int, layer: Layer | None
) -> None:
    set_in = {(Layer.DEPLOYMENT, ALL_STORES): deployed, (Layer.CEILING, ACME): ceiling, (Layer.STORE, ACME): asked}
    found = settings(
        *(
            Settings(layer=layer, store_id=store, limits={Limit.ACTIVE_RUNS: number})
            for (layer, store), number in set_in.items()
            if number is not None
        )
    ).limit(Limit.ACTIVE_RUNS, ACME)
    assert (found.value, found.layer) == (value, layer)
    assert (f"{asked} is above this ceiling" in found.reason) is (asked is not None and asked > value)


@pytest.mark.parametrize(
    ("floor", "ceiling", "own", "value", "layer"),
    [
        (None, None, None, 30, None),
        (20, None, 10, 20, Layer.DEPLOYMENT),
        (20, None, 25, 25, Layer.STORE),
        (20, 15, None, 20, Layer.DEPLOYMENT),
        (40, None, None, 40, Layer.DEPLOYMENT),
    ],
)
def test_no_layer_shortens_retention_below_the_deployments_floor(
    floor: int | None, ceiling: int | None, own: int | None, value: int, layer: Layer | None
) -> None:
    name, least = "conversation_retention_days", "conversation_retention_days_min"
    layers = deployed, of_store, own_layer = [
        Settings(layer=layer, store_id=store, limits={} if number is None else {limit: number})
        for layer, store, limit, number in (
            (Layer.DEPLOYMENT, ALL_STORES, least, floor),
            (Layer.CEILING, ACME, name, ceiling),
            (Layer.STORE, ACME, name, own),
        )
    ]
    found = settings(*layers).limit(Limit.CONVERSATION_RETENTION_DAYS, ACME)
    assert (found.value, found.layer) == (value, layer)
    below = min(ceiling or 30, own or 30)
    assert (f"{name} would be {below}, below this floor" in found.reason) is (value > below)
    for asked in (replace(of_store, limits={name: 9}), replace(own_layer, limits={name: 9})):
        with pytest.raises(InvalidField, match="at least 10, the value of conversation_retention_days_min, got 9"):
            updated(asked, (), settings(replace(deployed, limits={least: 10})), NOW)
    with pytest.raises(InvalidField, match=r"at least 9, .* got 8"):
        updated(replace(deployed, limits={least: 9, name: 8}), (), settings(), NOW)


def change(
    kept: Settings, *, version: int | None = None, unset: tuple[str, ...] = (), now: datetime = NOW, **asked: Any
) -> Settings:
    wanted = Settings(
        layer=kept.layer, store_id=kept.store_id, version=kept.version if version is None else version, **asked
    )
    return updated(wanted, unset, settings(kept), now)


def test_a_change_sets_the_named_values_and_keeps_the_others() -> None:
    kept = change(
        deployment(), switches={"runs": Switch(state=SwitchState.OFF, cancel_open_runs=True)}, limits={"active_runs": 7}
    )
    kept = change(kept, limits={"background_runs": 9}, unset=("active_runs",), now=NOW + timedelta(days=1))
    assert (kept.version, kept.limits) == (2, {"background_runs": 9})
    assert kept.texts == {"runs": "off, cancels open runs", "background_runs": "9"}
    assert settings(kept).cancels_before == NOW + timedelta(seconds=10)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"limits": {"active_runs": 0}}, "settings.limits.active_runs"),
        ({"limits": {"active_runs": 10_001}}, "settings.limits.active_runs"),
        ({"limits": {"daily_tokens": 2**53 + 1}}, "settings.limits.daily_tokens"),
        ({"models": ("a\n",)}, "settings.models"),
        ({"models": ("a",) * 201}, "settings.models"),
        ({"model_server": "a b"}, "settings.model_server"),
        ({"limits": {"active_run": 3}}, "settings.limits"),
        ({"switches": {"run": Switch(state=SwitchState.ALL)}}, "settings.switches"),
        ({"switches": {"runs": Switch(state=SwitchState.PERCENT, percent=101)}}, "settings.switches.runs.percent"),
        ({"switches": {"runs": Switch(state=SwitchState.ALL, percent=5)}}, "settings.switches.runs.percent"),
        (
            {"switches": {"triggers": Switch(state=SwitchState.OFF, cancel_open_runs=True)}},
            "settings.switches.triggers.cancel_open_runs",
        ),
        (
            {"switches": {"runs": Switch(state=SwitchState.LISTED, store_ids=frozenset({"a b"}))}},
            "settings.switches.runs.store_ids",
        ),
        ({"unset": ("runs",)}, "unset"),
        ({"switches": {"runs": Switch(state=SwitchState.LISTED)}}, "settings.switches.runs.store_ids"),
        (
            {"switches": {"runs": Switch(state=SwitchState.ALL, store_ids=frozenset({"acme"}))}},
            "settings.switches.runs.store_ids",
        ),
    ],
)
def test_errors_for_bad_values_name_the_field(asked: Mapping[str, Any], field: str) -> None:
    with pytest.raises(PawlError) as refused:
        change(deployment(), **asked)
    assert refused.value.metadata["field"] == field


def test_a_store_cannot_set_switches_or_exceed_its_ceiling() -> None:
    store = Settings(layer=Layer.STORE, store_id=ACME)
    for asked, says in (
        ({"switches": {"runs": Switch(state=SwitchState.ALL)}}, "only for all stores"),
        ({"limits": {"active_runs": 21}}, "at most 20, the store's ceiling, got 21"),
        ({"model_server": "eu"}, "only by a deployment key"),
        ({"limits": {"conversation_retention_days_min": 1}}, "only by a deployment key"),
    ):
        with pytest.raises(InvalidField, match=says):
            change(store, **asked)
    assert change(store, limits={"active_runs": 20}).limits == {"active_runs": 20}


@pytest.mark.parametrize(
    ("deployed", "ceiling", "own", "allowed"),
    [
        ((), (), (), ""),
        (("a", "b"), (), (), "a b"),
        (("a", "b"), ("c", "d"), (), "c d"),
        (("a", "b"), (), ("b", "c"), "b"),
        ((), (), ("c",), "c"),
        (("a",), (), ("c",), "a"),
    ],
)
def test_a_store_may_use_the_models_that_both_the_deployment_and_its_admins_list(
    deployed: tuple[str, ...], ceiling: tuple[str, ...], own: tuple[str, ...], allowed: str
) -> None:
    set_in = {(Layer.DEPLOYMENT, ALL_STORES): deployed, (Layer.CEILING, ACME): ceiling, (Layer.STORE, ACME): own}
    found = settings(*(Settings(layer=layer, store_id=store, models=names) for (layer, store), names in set_in.items()))
    assert " ".join(found.models(ACME)) == allowed
    store = Settings(layer=Layer.STORE, store_id=ACME, models=("z",))
    with pytest.raises(ModelNotAllowed, match="'z'") if deployed or ceiling else nullcontext():
        assert updated(store, (), found, NOW).models == ("z",)


def test_only_the_deployment_chooses_a_stores_model_server() -> None:
    ceiling = change(Settings(layer=Layer.CEILING, store_id=ACME), model_server="eu", models=("a",))
    assert (settings(ceiling).server(ACME), settings(ceiling).server(StoreId("beta"))) == ("eu", "")
    assert ceiling.texts == {"models": "a", "model_server": "eu"}
    assert change(ceiling, unset=("models", "model_server")).texts == {}


def test_an_outdated_version_conflicts() -> None:
    with pytest.raises(Conflict, match="read them again"):
        change(deployment(), version=1, limits={"active_runs": 3})


WRITES = [
    # caller, layers it reads, layers it changes
    (caller("deployment"), set(Layer), {Layer.DEPLOYMENT, Layer.CEILING}),
    (caller("admin"), {Layer.CEILING, Layer.STORE}, {Layer.STORE}),
    (caller("operator"), {Layer.CEILING, Layer.STORE}, set()),
    (caller("admin", credential=LOCAL_CREDENTIAL), set(Layer), set(Layer)),
    (caller("member", credential=LOCAL_CREDENTIAL), {Layer.CEILING, Layer.STORE}, set()),
]


@pytest.mark.parametrize(("who", "reads", "changes"), WRITES)
def test_only_deployment_keys_set_switches_and_ceilings_while_admins_set_store_limits(
    who: Principal, reads: set[Layer], changes: set[Layer]
) -> None:
    """OPS-1."""
    for writes, allowed in ((False, reads), (True, changes)):
        for layer in Layer:
            store_id = "" if layer is Layer.DEPLOYMENT else "acme"
            if layer in allowed:
                assert layer_of(who, layer, store_id, writes=writes) == store_id
            else:
                with pytest.raises(PermissionDenied):
                    layer_of(who, layer, store_id, writes=writes)


def test_only_the_deployment_may_access_other_stores() -> None:
    with pytest.raises(PermissionDenied):
        store_of(caller("admin"), "other")
    assert store_of(caller("deployment"), "other") == "other"
    with pytest.raises(InvalidField):
        store_of(caller("deployment"), "")
