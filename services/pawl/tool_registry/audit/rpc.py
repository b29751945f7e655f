"""Implements pawl.tool.v1.AuditService for a store's operators. The store comes from the caller's credential."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC
from typing import Any, Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Exceptions, timestamp
from pawl.errors import InvalidField, InvalidPageToken
from pawl.tool.v1 import audit_pb2 as pb
from pawl.tool.v1 import audit_pb2_grpc
from pawl.tool_registry.audit.recorder import verify
from pawl.tool_registry.audit.rules import AuditEntry, AuditFilter, AuditKind, Head
from pawl.tool_registry.audit.store.audit import PostgresAuditLog
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tools.wire import WIRE

_SEQ_MAX: Final = 2**63 - 1

_KINDS: Final = WIRE.enum(AuditKind, pb.AuditKind, field="kind")
_ENTRY: Final = WIRE.struct(
    AuditEntry,
    pb.AuditEntry,
    Exceptions(
        write={
            # 0 if the value was tampered with in the database.
            "kind": lambda entry: _KINDS.numbers.get(entry.draft.kind, 0),
            "time": lambda entry: timestamp(entry.draft.time_us / 1e6),
            "duration_seconds": lambda entry: entry.draft.duration_us / 1_000_000,
        },
        of_struct=("store_id", "kind", "time_us", "duration_us", "key_id"),
    ),
)


class AuditServicer(audit_pb2_grpc.AuditServiceServicer):
    def __init__(self, log: PostgresAuditLog) -> None:
        self._log = log

    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        store_id = require_user().store_id
        size = page_size(request.page_size, default=100, most=1000)
        wanted = _filter(store_id, request, "run_id", "call_id", "tool_name", "user_id", "agent_name")
        if request.kind:
            wanted = replace(wanted, kind=_KINDS.read(request.kind))
        (before,) = position_of("audit", request.page_token, tuple[int]) or (None,)
        if before is not None and not 0 <= before <= _SEQ_MAX:
            raise InvalidPageToken
        found = await self._log.listed(wanted, before_seq=before, rows_max=size + 1)
        page, token = cut(found, size, lambda entry: page_token("audit", entry.seq))
        return pb.ListAuditResponse(entries=map(_ENTRY.fields, page), next_page_token=token)

    async def VerifyAudit(
        self, request: pb.VerifyAuditRequest, context: Context
    ) -> AsyncIterator[pb.VerifyAuditResponse]:
        store_id = require_user().store_id
        if bool(request.known_seq) != bool(request.known_hash):
            raise InvalidField("known_seq and known_hash must be set together", field="known_seq")
        if request.known_seq > _SEQ_MAX:
            raise InvalidField(f"known_seq must be at most {_SEQ_MAX}, got {request.known_seq}", field="known_seq")
        known = Head(seq=request.known_seq, hash=request.known_hash.lower()) if request.known_seq else None
        async for found in verify(self._log, store_id, known):
            yield found

    async def GetToolAnalytics(
        self, request: pb.GetToolAnalyticsRequest, context: Context
    ) -> pb.GetToolAnalyticsResponse:
        wanted = _filter(require_user().store_id, request, "tool_name", "agent_name")
        figures = await self._log.figures(wanted, by_agent=request.by_agent)
        return pb.GetToolAnalyticsResponse(tools=figures)


def _filter(store_id: StoreId, request: Any, *fields: str) -> AuditFilter:
    texts = {field: getattr(request, field) for field in fields}
    for field, text in texts.items():
        if "\0" in text:
            raise InvalidField(f"{field} must not contain NUL characters", field=field)
    times = {field: _time(request, field) for field in ("since_time", "before_time")}
    return AuditFilter(store_id=store_id, **times, **texts)


def _time(request: Any, field: str) -> Any:
    try:
        return getattr(request, field).ToDatetime(UTC) if request.HasField(field) else None
    except (ValueError, OverflowError):
        raise InvalidField(f"{field} must be a valid time", field=field) from None
