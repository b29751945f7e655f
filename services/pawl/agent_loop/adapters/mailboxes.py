"""Mailboxes, which the registry reads."""

from __future__ import annotations

from typing import Final, cast

import grpc

from pawl.agent_loop.app.public_values import IncomingMail, MailboxView, MailPlace
from pawl.chassis.auth import Principal
from pawl.chassis.rpc_client import translated
from pawl.event.v1 import trigger_pb2
from pawl.tool.v1 import mailbox_pb2 as pb
from pawl.tool.v1 import mailbox_pb2_grpc

READ_SECONDS: Final = 50.0
"""The time for a session, the reading of its mails, and a wait for others."""


class MailboxClient:
    """A `MailboxReader` over a channel to the registry. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = mailbox_pb2_grpc.MailboxServiceStub(channel)

    async def read_mailbox(
        self, caller: Principal, mailbox: object, place: MailPlace, *, mails_max: int, documents_prefix: str = ""
    ) -> MailboxView:
        request = pb.ReadMailboxRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            mailbox=cast("trigger_pb2.MailboxSource", mailbox),
            uid_validity=place.uid_validity,
            after_uid=place.uid,
            mails_max=mails_max,
            documents_prefix=documents_prefix,
        )
        response = await translated(self._stub.ReadMailbox(request, timeout=READ_SECONDS))
        return MailboxView(
            place=MailPlace(uid_validity=response.uid_validity, uid=response.last_uid),
            mails=tuple(
                IncomingMail(uid=mail.uid, refusal=mail.refusal, data_json=mail.data_json) for mail in response.mails
            ),
            has_more=response.has_more,
        )
