"""Implements NotifyService."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from contextlib import aclosing
from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.identity.roles import APPROVERS
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Translator
from pawl.errors import InvalidField, InvalidPageToken, SlowConsumer
from pawl.notifier.inbox.rules import Inbox, NotificationId
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.inbox.subscription import Subscriptions
from pawl.notify.v1 import notify_pb2 as pb
from pawl.notify.v1 import notify_pb2_grpc

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 200
IDS_MAX: Final = 200


# Translate between messages and domain types.
WIRE: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field}: {unknown.value} is not known", field=unknown.field)
)


def caller_inbox() -> Inbox:
    return Inbox.of(require_user())


def page_size(requested: int) -> int:
    """Return the page size. A size of 0 means the default.

    Raises:
        InvalidField: More than 200 were requested.
    """
    if requested > PAGE_MAX:
        raise InvalidField(f"page_size must be between 0 and {PAGE_MAX}, got {requested}", field="page_size")
    return requested or PAGE_DEFAULT


def several_ids(ids: Collection[str], field: str) -> list[str]:
    """Return a list of ids if it is valid.

    Raises:
        InvalidField: There are no ids, or more than 200.
        InvalidId: An id is malformed.
    """
    if not 1 <= len(ids) <= IDS_MAX:
        raise InvalidField(f"{field} must have 1 to {IDS_MAX} ids, got {len(ids)}", field=field)
    return [check_id(value, field) for value in ids]


HEARTBEAT_SECONDS: Final = 15.0
_NUMBER_MAX: Final = 2**63 - 1


class Notify(notify_pb2_grpc.NotifyServiceServicer):
    def __init__(
        self,
        store: PostgresStore,
        subscriptions: Subscriptions,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        write_seconds_max: float = 30.0,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._heartbeat_seconds = heartbeat_seconds
        self._write_seconds_max = write_seconds_max

    async def Subscribe(  # type: ignore[override]  # writes directly, to bound the time of a write
        self, request: pb.SubscribeRequest, context: Context
    ) -> None:
        inbox, approves = await self._reader()
        if request.after_number > _NUMBER_MAX:
            raise InvalidField(f"after_number must be at most {_NUMBER_MAX}", field="after_number")
        sent = request.after_number
        following = self._subscriptions.follow(
            inbox,
            approves=approves,
            after_number=None if request.only_new else request.after_number,
            silence_seconds=self._heartbeat_seconds,
        )
        async with aclosing(following):
            async for notification in following:
                response = pb.SubscribeResponse(notification=notification)
                try:
                    async with asyncio.timeout(self._write_seconds_max):
                        await context.write(response)
                except TimeoutError:
                    raise SlowConsumer(
                        f"nothing was read for {self._write_seconds_max:g} s: subscribe again with after_number={sent}",
                        resume_after_seq=sent,
                    ) from None
                sent = notification.number if notification is not None else sent

    async def ListNotifications(
        self, request: pb.ListNotificationsRequest, context: Context
    ) -> pb.ListNotificationsResponse:
        inbox, approves = await self._reader()
        size = page_size(request.page_size)
        filtered = "unread" if request.only_unread else "all"
        before = re.fullmatch(rf"{filtered}-([0-9]{{1,18}})", request.page_token)
        if request.page_token and before is None:
            raise InvalidPageToken  # The token is from another method or filter.
        number = int(before[1]) if before else None
        found = await self._store.read_before(
            inbox, number, only_unread=request.only_unread, approves=approves, limit=size + 1
        )
        page = found[:size]
        return pb.ListNotificationsResponse(
            notifications=page,
            next_page_token=f"{filtered}-{page[-1].number}" if len(found) > size else "",
            unread_count=await self._store.count_unread(inbox, approves=approves),
        )

    async def AcknowledgeNotifications(
        self, request: pb.AcknowledgeNotificationsRequest, context: Context
    ) -> pb.AcknowledgeNotificationsResponse:
        ids = [NotificationId(each) for each in several_ids(request.notification_ids, "notification_ids")]
        inbox, approves = await self._reader()
        acknowledged = await self._store.acknowledge(inbox, ids, approves=approves)
        return pb.AcknowledgeNotificationsResponse(notifications=acknowledged)

    async def _reader(self) -> tuple[Inbox, bool]:
        """Return the caller's inbox, and whether the caller is an approver for the store.

        If so, record the caller as an approver.
        """
        caller = require_user()
        inbox = Inbox(store_id=caller.store_id, user_id=caller.user_id)
        approves = caller.decides and not caller.roles.isdisjoint(APPROVERS)
        if approves:
            await self._store.note_approver(inbox)
        return inbox, approves
