"""Servicers for pawl.identity.v1, with which users manage API keys and services sync them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import grpc

from pawl.chassis.identity.auth import Principal, current_principal
from pawl.chassis.ids import KeyId, StoreId, UserId, check_id, is_id
from pawl.chassis.rpc.translate import Translator
from pawl.errors import InvalidField, KeyNotFound, PermissionDenied
from pawl.identity.v1 import key_pb2 as pb
from pawl.identity.v1 import key_pb2_grpc, key_sync_pb2, key_sync_pb2_grpc
from pawl.job_store.keys.keys import Keys
from pawl.job_store.keys.rules import Key, KeyEvent, KeyEventKind, visible_store
from pawl.job_store.ledger.pages import Id, Large, make_token, page_size, read_token
from pawl.server.identity import key_sync

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_WIRE: Final = Translator(lambda unknown: InvalidField(f"unknown value {unknown.value}", field=unknown.field))
_KEY: Final = _WIRE.struct(Key, pb.Key)
_EVENT: Final = _WIRE.struct(KeyEvent, pb.KeyEvent)
_KIND: Final = _WIRE.enum(KeyEventKind, pb.KeyEventKind, field="kind")
_LAST_EVENT: Final = 2**63 - 1


class KeyServicer(key_pb2_grpc.KeyServiceServicer):
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        request_id = check_id(request.request_id, "request_id", optional=True)
        made = await self._keys.create(_governor(), _asked(request.key), request_id)
        return pb.CreateKeyResponse(key=_KEY.write(made.key), secret=made.secret)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        size = page_size(request.page_size)
        governor = _governor()
        selection = (request.store_id or governor.store_id, request.include_ended)
        found = await self._keys.list(
            governor,
            request.store_id,
            include_ended=request.include_ended,
            before=read_token(request.page_token, "ListKeys", selection, Id) or "",
            keys_max=size + 1,
        )
        page = found[:size]
        token = make_token("ListKeys", selection, page[-1].key_id) if len(found) > size else ""
        return pb.ListKeysResponse(keys=map(_KEY.write, page), next_page_token=token)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        governor = _governor()
        if not is_id(request.key_id):
            raise KeyNotFound
        return pb.RevokeKeyResponse(key=_KEY.write(await self._keys.revoke(governor, KeyId(request.key_id))))

    async def ListKeyEvents(self, request: pb.ListKeyEventsRequest, context: Context) -> pb.ListKeyEventsResponse:
        size, governor = page_size(request.page_size), _governor()
        key_id = check_id(request.key_id, "key_id", optional=True)
        kind = _KIND.read(request.kind) if request.kind else None
        selection = (request.store_id or governor.store_id, request.key_id, request.kind)
        before = read_token(request.page_token, "ListKeyEvents", selection, Large)
        found = await self._keys.repository.list_events(
            visible_store(governor, request.store_id),
            key_id,
            kind,
            before=_LAST_EVENT if before is None else before,
            events_max=size + 1,
        )
        page = found[:size]
        token = make_token("ListKeyEvents", selection, page[-1].event_id) if len(found) > size else ""
        return pb.ListKeyEventsResponse(events=map(_EVENT.write, page), next_page_token=token)


class KeySyncServicer(key_sync_pb2_grpc.KeySyncServiceServicer):
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def SyncKeys(self, request: key_sync_pb2.SyncKeysRequest, context: Context) -> key_sync_pb2.SyncKeysResponse:
        if request.after_change >= 1 << 63:
            raise InvalidField("after_change must be a change that SyncKeys has returned", field="after_change")
        changes = await self._keys.sync_keys(request.after_change, request.used_key_ids)
        return key_sync.CHANGES.write(changes)


def _governor() -> Principal:
    """Return the caller after checking that it may manage keys.

    Raises:
        PermissionDenied: The caller is a delegate without the right to decide. With a new key, it could grant itself
            that right.
    """
    principal = current_principal()
    if not principal.decides:
        raise PermissionDenied(
            "delegate keys without decides_for_users cannot manage keys: use an operator's or a deployment key"
        )
    return principal


def _asked(message: pb.Key) -> Key:
    """Return the key fields that a request may set. The service sets the others.

    Raises:
        InvalidField: `expire_time` is not a valid time.
    """
    expire_time = None
    if message.HasField("expire_time"):
        try:
            expire_time = message.expire_time.ToDatetime(tzinfo=UTC)
        except (ValueError, OverflowError):
            raise InvalidField("expire_time must be a valid time", field="key.expire_time") from None
    return Key(
        name=message.name,
        store_id=StoreId(message.store_id),
        user_id=UserId(message.user_id),
        roles=frozenset(message.roles),
        decides_for_users=message.decides_for_users,
        expire_time=expire_time,
        create_time=datetime.fromtimestamp(0, UTC),
    )
