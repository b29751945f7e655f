"""pawl.tool.v1.MailboxService: mails for triggers."""

from __future__ import annotations

from pawl.chassis.auth import Principal
from pawl.chassis.ids import check_id
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.chassis.rpc_kinds import Context
from pawl.errors import InvalidField
from pawl.tool.v1 import mailbox_pb2 as pb
from pawl.tool.v1 import mailbox_pb2_grpc
from pawl.tool_registry.app.mailboxes.mailboxes import MAILS_MAX, Mailboxes, Wanted
from pawl.tool_registry.domain.mail import Senders


class MailboxServicer(mailbox_pb2_grpc.MailboxServiceServicer):
    """Translates between the wire and the mailboxes."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes

    async def ReadMailbox(self, request: pb.ReadMailboxRequest, context: Context) -> pb.ReadMailboxResponse:
        if request.mails_max > MAILS_MAX:
            raise InvalidField(f"mails_max is at most {MAILS_MAX}", field="mails_max")
        mailbox = request.mailbox
        found, mails = await self._mailboxes.read(
            Principal(store_id=check_id(request.store_id, "store_id"), user_id=check_id(request.user_id, "user_id")),
            MailboxPlace.of(mailbox),
            mailbox.password_secret,
            Senders(authserv_id=mailbox.authserv_id, senders=tuple(mailbox.senders), own=mailbox.username),
            Wanted(uid_validity=request.uid_validity, after_uid=request.after_uid, mails_max=request.mails_max),
            documents_prefix=request.documents_prefix,
        )
        return pb.ReadMailboxResponse(
            uid_validity=found.uid_validity,
            last_uid=found.last_uid,
            mails=[pb.Mail(uid=mail.uid, refusal=mail.refusal, data_json=mail.data_json) for mail in mails],
            has_more=found.has_more,
        )
