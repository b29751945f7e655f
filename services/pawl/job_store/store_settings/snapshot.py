"""The settings of all stores, which are held in memory and can be changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import PawlError
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rules.slots import SlotLimits, StoreSlots
from pawl.job_store.store_settings.changes import check_model_server, updated
from pawl.job_store.store_settings.rules import (
    ALL_STORES,
    RUN_LIMITS,
    TOKEN_LIMITS,
    AllSettings,
    Layer,
    Limit,
    Settings,
)
from pawl.job_store.store_settings.store import PostgresSettings
from pawl.values import Feature

_POLL_SECONDS: Final = 1.0
_STORES_KEPT_MAX: Final = 10_000
_WAKES: Final = 3

_log = logs.get_logger(__name__)


async def _nothing() -> None: ...


class SettingsSnapshot:
    """The settings that this process last read. `run` reads them every second.

    `started_with` holds the limits that apply if no layer sets them. Features in `forced_off` are off in all stores.
    `woken` is called after the snapshot has made runs due.
    """

    def __init__(
        self,
        repository: PostgresSettings,
        clock: Clock,
        started_with: Limits,
        forced_off: Collection[Feature] = (),
        woken: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self.repository = repository
        self._clock = clock
        self._limits = started_with
        slots = started_with.slots
        self._started_with = {
            Limit.ACTIVE_RUNS: slots.per_store,
            Limit.ACTIVE_RUNS_PER_USER: slots.per_user,
            Limit.BACKGROUND_RUNS: slots.background_per_store,
            Limit.WEIGHT: slots.weight,
            Limit.CONVERSATION_RETENTION_DAYS: started_with.conversation_retention_days,
            Limit.CONVERSATION_RETENTION_DAYS_MIN: 1,
        }
        self._forced_off = forced_off
        self._layers: dict[tuple[Layer, StoreId], Settings] = {}
        self._last_change = 0
        self._is_failing = False
        self._limits_of: dict[StoreId, Limits] = {}
        # Stores whose token budgets have changed, with the number of polls at which `run` wakes their waiting runs. At
        # the first one, a run may still be parking, or another replica may not know the budget yet.
        self._raised: dict[StoreId, int] = {}
        self._woken = woken
        self._lock = asyncio.Lock()
        self.all = self._combined(())
        self.slots = StoreSlots(slots)
        # The size of each store that has a limit, when it was last counted.
        self.stored_bytes: dict[StoreId, int] = {}

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
                await self._wake()
            except PawlError as error:
                if not self._is_failing:
                    _log.warning("settings.not_read", reason=error.message)
                self._is_failing = True
            else:
                self._is_failing = False
            await self._clock.sleep(_POLL_SECONDS)

    async def _wake(self) -> None:
        """If a token budget has changed, let the runs that are waiting for it check it again."""
        for raised, left in list(self._raised.items()):
            stores = await self.repository.stores_with_open_runs() if raised == ALL_STORES else [raised]
            for store_id in stores:
                if await self.repository.wake(store_id, list(TOKEN_LIMITS.values())):
                    await self._woken()
            if self._raised.get(raised) == left:
                self._raised[raised] = left - 1
                if not self._raised[raised]:
                    del self._raised[raised]

    async def refresh(self) -> None:
        """Read the settings that have changed.

        Raises:
            PawlError: The settings cannot be read now.
        """
        async with self._lock:
            known = self._layers
            layers, last_change = await self.repository.changed_layers(self._last_change)
            if last_change < self._last_change:  # The database is an older copy.
                layers, last_change = await self.repository.changed_layers(0)
                known = {}
            if last_change != self._last_change:
                raised = (each.store_id for each in layers if _tokens(each) != _tokens(known.get(_key(each))))
                self._raised |= dict.fromkeys(raised, _WAKES)
                self._layers = {**known, **{_key(each): each for each in layers}}
                self._last_change = last_change
                self._apply()

    def _apply(self) -> None:
        self.all = self._combined(self._layers.values())
        self._limits_of.clear()
        self.slots.default = default = self._slots(ALL_STORES)
        of_stores = {store_id: self._slots(store_id) for _, store_id in self._layers if store_id}
        self.slots.overrides = {store_id: slots for store_id, slots in of_stores.items() if slots != default}

    async def count_stored_bytes(self) -> None:
        """Count the data of all stores that have a limit. A store that cannot be counted keeps its last size."""
        limited = {store_id for (_, store_id), each in self._layers.items() if Limit.STORED_BYTES in each.limits}
        stores = await self.repository.stores() if ALL_STORES in limited else limited
        self.stored_bytes = {each: self.stored_bytes[each] for each in stores if each in self.stored_bytes}
        self._limits_of.clear()
        for store_id in stores:
            try:
                self.stored_bytes[store_id] = await self.repository.stored_bytes(store_id)
            except Exception:  # noqa: BLE001  # the next count tries again
                _log.exception("stored_bytes.not_counted", store=store_id)
            self._limits_of.pop(store_id, None)

    async def update(
        self, caller: Principal, requested: Settings, unset: Collection[str], *, only_check: bool
    ) -> Settings:
        """Change a layer and record the change. `requested` contains the layer, its version, and the values to set.

        Raises:
            Conflict: The version is not the current one.
            InvalidField: The name of a setting or model server is unknown, or a value is out of range.
        """

        def change(layers: Sequence[Settings], now: datetime) -> tuple[Settings, Settings]:
            current = self._combined(layers)
            after = updated(requested, unset, current, now)
            return current.layer(requested.layer, requested.store_id), msgspec.structs.replace(
                after, update_user_id=caller.user_id, update_credential_id=caller.credential_id
            )

        if requested.model_server:
            check_model_server(requested.model_server, await self.repository.model_servers())
        settings = await self.repository.update(requested.store_id, change, only_check=only_check)
        if not only_check:
            _log.info(
                "settings.changed",
                layer=settings.layer.name,
                settings_store=settings.store_id,
                by=caller.user_id,
                credential=caller.credential_id,
                names=sorted(map(str, {*requested.texts, *unset})),
            )
            with suppress(PawlError):  # the next poll reads it
                await self.refresh()
        return settings

    def limits_of(self, store_id: StoreId) -> Limits:
        if (limits := self._limits_of.get(store_id)) is None:
            while len(self._limits_of) >= _STORES_KEPT_MAX:
                self._limits_of.pop(next(iter(self._limits_of)))
            tokens = {kind: self.all.limit(name, store_id) for name, kind in TOKEN_LIMITS.items()}
            limits = self._limits_of[store_id] = replace(
                self._limits,
                slots=self.slots.of(store_id),
                off=self.all.off(store_id),
                tokens={kind: limit.value for kind, limit in tokens.items() if limit.is_set},
                models=frozenset(self.all.models(store_id)),
                model_server=self.all.server(store_id),
                of_runs={name: most for name in RUN_LIMITS if (most := self._limit(name, store_id))},
                model_requests_per_minute=self._limit(Limit.MODEL_REQUESTS_PER_MINUTE, store_id),
                model_tokens_per_minute=self._limit(Limit.MODEL_TOKENS_PER_MINUTE, store_id),
                events_per_second=self._limit(Limit.EVENTS_PER_SECOND, store_id),
                conversation_retention_days=self._limit(Limit.CONVERSATION_RETENTION_DAYS, store_id),
                is_full=0 < self._limit(Limit.STORED_BYTES, store_id) <= self.stored_bytes.get(store_id, 0),
            )
        return limits

    def off(self, store_id: StoreId) -> Collection[Feature]:
        return self.limits_of(store_id).off

    def _limit(self, name: Limit, store_id: StoreId) -> int:
        decided = self.all.limit(name, store_id)
        return decided.value if decided.is_set else 0

    def _slots(self, store_id: StoreId) -> SlotLimits:
        return SlotLimits(
            per_store=self.all.limit(Limit.ACTIVE_RUNS, store_id).value,
            per_user=self.all.limit(Limit.ACTIVE_RUNS_PER_USER, store_id).value,
            background_per_store=self.all.limit(Limit.BACKGROUND_RUNS, store_id).value,
            weight=self.all.limit(Limit.WEIGHT, store_id).value,
        )

    def _combined(self, layers: Collection[Settings]) -> AllSettings:
        return AllSettings(layers, self._started_with, self._forced_off)


def _key(settings: Settings) -> tuple[Layer, StoreId]:
    return settings.layer, settings.store_id


def _tokens(settings: Settings | None) -> Mapping[str, int]:
    limits = settings.limits if settings is not None else {}
    return {name: value for name, value in limits.items() if name in list(TOKEN_LIMITS)}
