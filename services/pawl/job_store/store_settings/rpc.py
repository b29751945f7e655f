"""Servicer for pawl.settings.v1.SettingsService."""

from __future__ import annotations

from typing import Final

from pawl.chassis.identity.auth import current_principal
from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Exceptions, Translator
from pawl.errors import InvalidField
from pawl.job_store.ledger.pages import Large, make_token, page_size, read_token
from pawl.job_store.ledger.store.usage import PostgresTokens
from pawl.job_store.store_settings.rules import (
    EffectiveValue,
    Layer,
    Settings,
    Switch,
    governs_all,
    layer_of,
    store_of,
    with_size,
    with_usage,
)
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.store_settings.store import SettingsChange
from pawl.settings.v1 import settings_pb2 as pb
from pawl.settings.v1 import settings_pb2_grpc

_WIRE: Final = Translator(lambda unknown: InvalidField(f"unknown value {unknown.value}", field=unknown.field))
_LAYER: Final = _WIRE.enum(Layer, pb.SettingsLayer, field="layer")
_SWITCH: Final = _WIRE.struct(Switch, pb.Switch, field="settings.switches")
_SETTINGS: Final = _WIRE.struct(
    Settings,
    pb.Settings,
    Exceptions(
        read={"switches": lambda message: {name: _SWITCH.read(each) for name, each in message.switches.items()}},
        write={"switches": lambda settings: {name: _SWITCH.write(each) for name, each in settings.switches.items()}},
        of_struct=("update_credential_id",),
    ),
)
_CHANGE: Final = _WIRE.struct(SettingsChange, pb.SettingsChange)
_LAST_CHANGE: Final = 2**63 - 1


class SettingsServicer(settings_pb2_grpc.SettingsServiceServicer):
    def __init__(self, settings: SettingsSnapshot, usage: PostgresTokens) -> None:
        self._settings = settings
        self._usage = usage

    async def GetSettings(self, request: pb.GetSettingsRequest, context: Context) -> pb.GetSettingsResponse:
        layer = _LAYER.read(request.layer)
        store_id = layer_of(current_principal(), layer, request.store_id)
        await self._settings.refresh()
        return pb.GetSettingsResponse(settings=_SETTINGS.write(self._settings.all.layer(layer, store_id)))

    async def UpdateSettings(self, request: pb.UpdateSettingsRequest, context: Context) -> pb.UpdateSettingsResponse:
        caller, requested = current_principal(), request.settings
        layer = _LAYER.read(requested.layer)
        store_id = layer_of(caller, layer, requested.store_id, writes=True)
        if requested.version >= 1 << 63:
            raise InvalidField("settings.version must be less than 2^63", field="settings.version")
        read = _SETTINGS.read(
            pb.Settings(
                layer=requested.layer,
                store_id=store_id,
                version=requested.version,
                switches=requested.switches,
                limits=requested.limits,
                models=requested.models,
                model_server=requested.model_server,
            )
        )
        stored = await self._settings.update(caller, read, request.unset, only_check=request.validate_only)
        return pb.UpdateSettingsResponse(settings=_SETTINGS.write(stored))

    async def ExplainSettings(self, request: pb.ExplainSettingsRequest, context: Context) -> pb.ExplainSettingsResponse:
        caller = current_principal()
        store_id = store_of(caller, request.store_id)
        await self._settings.refresh()
        explained = self._settings.all.explained(store_id)
        if self._settings.limits_of(store_id).tokens:
            used = await self._usage.tokens(store_id, caller.user_id)
            is_own = caller.store_id == store_id
            explained = [with_usage(each, used, of_user=is_own) for each in explained]
        size = self._settings.stored_bytes.get(store_id)
        explained = [each if size is None else with_size(each, size) for each in explained]
        return pb.ExplainSettingsResponse(explanations=map(_explanation, explained))

    async def ListSettingsChanges(
        self, request: pb.ListSettingsChangesRequest, context: Context
    ) -> pb.ListSettingsChangesResponse:
        caller, size = current_principal(), page_size(request.page_size)
        sees_all = governs_all(caller) and not request.store_id
        store_id = None if sees_all else store_of(caller, request.store_id)
        selection = (store_id or StoreId(""),)
        before = read_token(request.page_token, "ListSettingsChanges", selection, Large)
        found = await self._settings.repository.changes(
            store_id, before=_LAST_CHANGE if before is None else before, changes_max=size + 1
        )
        page = found[:size]
        token = make_token("ListSettingsChanges", selection, page[-1].change) if len(found) > size else ""
        return pb.ListSettingsChangesResponse(changes=map(_CHANGE.write, page), next_page_token=token)


def _explanation(effective: EffectiveValue) -> pb.Explanation:
    return pb.Explanation(
        name=effective.name,
        value=effective.shown,
        layer=_LAYER.write(effective.layer) if effective.layer else pb.SETTINGS_LAYER_UNSPECIFIED,
        reason=effective.reason,
    )
