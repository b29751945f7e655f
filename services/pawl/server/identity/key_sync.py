"""Synchronises API keys from job-store to the other services."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import grpc

from pawl.chassis.rpc.client import translating
from pawl.chassis.rpc.translate import Exceptions, Translator
from pawl.identity.v1 import key_sync_pb2 as pb
from pawl.identity.v1.key_sync_pb2_grpc import KeySyncServiceStub
from pawl.server.identity.key_rows import KeyChanges, KeyGrant

_DEADLINE_SECONDS: Final = 3.0
_WIRE: Final = Translator(lambda unknown: ValueError(f"{unknown.value} is unknown"))
_WIRE.struct(
    KeyGrant,
    pb.KeyGrant,
    Exceptions(read={"credential_id": attrgetter("key_id")}, write={"key_id": attrgetter("credential_id")}),
)
CHANGES: Final = _WIRE.struct(KeyChanges, pb.SyncKeysResponse)


class KeySyncClient:
    def __init__(self, job_store: grpc.aio.Channel) -> None:
        self._stub = KeySyncServiceStub(job_store)

    async def sync_keys(self, after_change: int, used_key_ids: Sequence[str]) -> KeyChanges:
        request = pb.SyncKeysRequest(after_change=after_change, used_key_ids=used_key_ids)
        with translating():
            return CHANGES.read(await self._stub.SyncKeys(request, timeout=_DEADLINE_SECONDS))
