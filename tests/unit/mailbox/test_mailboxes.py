"""The process that reads mailboxes: each e-mail is delivered once, and problems are reported."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, Counter

from pawl.agent.v1.trigger_pb2 import DeliverMailRequest, DeliverMailResponse
from pawl.chassis.identity.auth import acting_for, service_principal, set_principal
from pawl.chassis.process.tasks import end
from pawl.errors import DependencyUnavailable, PermissionDenied, TooLarge
from pawl.event.v1.schedule_pb2 import ScheduleFire
from pawl.event.v1.trigger_pb2 import LeasedMailbox, MailboxSource, MailPosition
from pawl.job.v1 import triggers_pb2
from pawl.mailbox import mailboxes
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.policy import read_rules
from pawl.tool.v1.document_pb2 import (
    DOCUMENT_OWNER_USER,
    DeleteDocumentRequest,
    PutDocumentRequest,
    PutDocumentResponse,
)
from pawl.tool_registry.documents.rpc import DocumentServicer
from tests.fakes.imap_server import ImapServer
from tests.poll import until

MAIL = "From: ann@example.com\n\nhello"


class Peers:
    """The other services as channels: a ledger that keeps positions, and a document store with space for two documents.

    `refused` deliveries fail, and the next `lost` responses to deliveries never arrive.
    """

    def __init__(self, *leased: LeasedMailbox) -> None:
        self.leased = {each.trigger_id: each for each in leased}
        self.mails: list[DeliverMailRequest] = []
        self.texts: dict[str, str] = {}
        self.reasons: list[str] = []
        self.lost = 0
        self.deliveries = 0
        self.refusals: list[float] = []
        self.refused = 0

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, *, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
            assert not metadata or dict(metadata) == {
                "authorization": "Bearer key",
                "pawl-store": "acme",
                "pawl-user": "ann",
            }
            return getattr(self, method.rpartition("/")[2])(request)

        return call

    def LeaseMailboxes(self, request: triggers_pb2.LeaseMailboxesRequest) -> triggers_pb2.LeaseMailboxesResponse:
        assert request.reader_id == "reader"
        return triggers_pb2.LeaseMailboxesResponse(mailboxes=self.leased.values())

    def ReportMailbox(self, request: triggers_pb2.ReportMailboxRequest) -> triggers_pb2.ReportMailboxResponse:
        self.reasons.append(request.reason)
        if request.HasField("position"):
            self.leased[request.trigger_id].position.CopyFrom(request.position)
        return triggers_pb2.ReportMailboxResponse()

    def DeliverMail(self, request: DeliverMailRequest) -> DeliverMailResponse:
        self.deliveries += 1
        if self.refused:
            self.refused -= 1
            self.refusals.append(time.monotonic())
            raise DependencyUnavailable
        kept = self.leased[request.trigger_id]
        if request.generation != kept.generation:
            return DeliverMailResponse()
        duplicate = request.position.uid <= kept.position.uid
        if not duplicate:
            kept.position.CopyFrom(request.position)
            self.mails.append(request)
        if self.lost:
            self.lost -= 1
            raise DependencyUnavailable
        return DeliverMailResponse(fire=None if duplicate else ScheduleFire(), duplicate=duplicate)

    def PutDocument(self, request: PutDocumentRequest) -> PutDocumentResponse:
        if len(self.texts) == 2 and request.name not in self.texts:
            raise TooLarge("the store is full")
        self.texts[request.name] = request.text
        return PutDocumentResponse()


def mailbox_of(server: ImapServer, trigger_id: str = "trg_1", **fields: Any) -> LeasedMailbox:
    given: dict[str, Any] = {"password_secret": "mail", "username": "pawl", "folder": "INBOX"} | fields
    source = MailboxSource(
        host="127.0.0.1", port=server.port, plaintext=True, senders=["@example.com"], poll_seconds=15, **given
    )
    return LeasedMailbox(
        store_id="acme",
        user_id="ann",
        trigger_id=trigger_id,
        name="orders",
        generation=1,
        mailbox=source,
        position=MailPosition(uid_validity=7),
    )


@asynccontextmanager
async def reading(peers: Peers, *servers: ImapServer) -> AsyncIterator[asyncio.Task[None]]:
    channel = cast("grpc.aio.Channel", peers)
    passwords: Mapping[str, Mapping[str, str]] = {"acme": {"mail": "secret", "wrong": "other"}, "other": {"no": "x"}}
    reader = mailboxes.Mailboxes(
        channel,
        channel,
        channel,
        key=lambda: "key",
        passwords=lambda: passwords,
        egress=GuardedEgress({"acme": read_rules(None, [f"127.0.0.1:{server.port}" for server in servers])}),
        reader_id="reader",
        failures=Counter("failures", "", registry=CollectorRegistry()),
    )
    task = asyncio.create_task(reader.run())
    try:
        yield task
    finally:
        await end([task])


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "LEASE_SECONDS", 0.05)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ImapServer]:
    async with ImapServer(username="pawl") as server:
        yield server


async def test_an_unacknowledged_email_is_delivered_again_and_counts_once(
    server: ImapServer,
) -> None:
    for _ in range(12):
        server.add(MAIL)
    peers = Peers(mailbox_of(server))
    peers.lost = 2
    async with reading(peers, server):
        await until(lambda: len(peers.mails) == 12)
    # The process ends between a delivery and its response, and another process starts.
    server.add(MAIL)
    peers.lost = 1
    async with reading(peers, server) as first:
        await until(lambda: peers.lost == 0)
        await end([first])
    async with reading(peers, server):
        server.add(MAIL)
        await until(lambda: len(peers.mails) == 14)
    folder = peers.mails[0].event_id.rpartition(".")[0]
    ids = [(mail.position.uid, mail.event_id) for mail in peers.mails]
    assert ids == [(uid, f"{folder}.{uid}") for uid in range(1, 15)]


async def test_retries_of_an_undeliverable_email_back_off(server: ImapServer) -> None:
    server.add(MAIL)
    peers = Peers(mailbox_of(server))
    peers.refused = 3
    async with reading(peers, server):
        await until(lambda: peers.mails)
    pauses = [after - before for before, after in pairwise(peers.refusals)]
    assert all(pause >= 0.05 * 2**number for number, pause in enumerate(pauses, 1)), pauses


async def test_a_new_mailbox_is_read_from_its_end(server: ImapServer) -> None:
    server.add(MAIL)
    peers = Peers(mailbox_of(server))
    peers.leased["trg_1"].position.Clear()
    async with reading(peers, server):
        await until(lambda: peers.leased["trg_1"].position.uid == 1)
    server.add(MAIL)
    async with reading(peers, server):
        await until(lambda: peers.mails)
    assert [mail.position.uid for mail in peers.mails] == [2]


async def test_text_attachments_become_documents_of_the_user(server: ImapServer) -> None:
    parts = "".join(
        f'--b\nContent-Type: text/csv\nContent-Disposition: attachment; filename="{n}.csv"\n\n{n}\n' for n in range(3)
    )
    server.add(f"From: ann@example.com\nContent-Type: multipart/mixed; boundary=b\n\n{parts}--b--\n")
    server.add("From: bob@other.example\n\nhello")
    peers = Peers(mailbox_of(server))
    async with reading(peers, server):
        await until(lambda: len(peers.mails) == 2)
    first, second = peers.mails
    attachments = json.loads(first.data_json)["attachments"]
    folder = f"mail/orders/{first.event_id}"
    assert [each.get("document") for each in attachments] == [f"{folder}/0-0.csv", f"{folder}/1-1.csv", None]
    assert attachments[2]["left_out"] == "the store is full"
    assert peers.texts == {f"{folder}/0-0.csv": "0", f"{folder}/1-1.csv": "1"}
    assert second.skipped == "bob@other.example is not one of the allowed senders"


@pytest.mark.parametrize(
    ("fields", "is_allowed", "reason"),
    [
        ({"password_secret": "wrong"}, True, "refuses the user name or password"),
        ({"password_secret": "no"}, True, "no usable password named 'no'"),
        ({"folder": "Spam"}, True, "has no folder Spam"),
        ({}, False, "PAWL_EGRESS_FILE"),
    ],
)
async def test_the_reason_why_a_mailbox_cannot_be_read_is_reported(
    server: ImapServer, fields: dict[str, str], *, is_allowed: bool, reason: str
) -> None:
    """No password is sent to a server that egress rules refuse."""
    peers = Peers(mailbox_of(server, **fields))
    async with reading(peers, *[server] * is_allowed):
        await until(lambda: peers.reasons)
    assert reason in peers.reasons[0]
    assert is_allowed or not server.sessions


async def test_a_changed_trigger_is_used_in_its_current_version(server: ImapServer) -> None:
    server.add(MAIL)
    old = mailbox_of(server)
    old.generation = 0
    peers = Peers(mailbox_of(server))

    def lease(_: object, *, first: list[LeasedMailbox] = [old]) -> Any:  # noqa: B006
        return triggers_pb2.LeaseMailboxesResponse(mailboxes=first or peers.leased.values())

    peers.LeaseMailboxes = lease  # type: ignore[assignment,method-assign]
    async with reading(peers, server):
        await until(lambda: peers.deliveries)
        assert peers.mails == []
        del peers.LeaseMailboxes
        await until(lambda: peers.mails)


async def test_a_hanging_server_does_not_delay_other_mailboxes(server: ImapServer) -> None:
    server.add(MAIL)
    async with ImapServer(username="pawl") as hanging:
        hanging.answers.clear()
        peers = Peers(mailbox_of(hanging), mailbox_of(server, "trg_2"))
        async with reading(peers, server, hanging):
            await until(lambda: hanging.sessions)
            await until(lambda: peers.mails)
        hanging.answers.set()


async def test_the_mailbox_service_stores_documents_only_for_a_user() -> None:
    """Without a user, a document would belong to the store and be visible to every user's runs."""
    set_principal(acting_for(service_principal("mailbox"), {"pawl-store": "acme"}))
    servicer, context = DocumentServicer(cast("Any", None)), cast("Any", None)
    for call in (
        servicer.PutDocument(PutDocumentRequest(owner=DOCUMENT_OWNER_USER, name="x", text="x"), context),
        servicer.DeleteDocument(DeleteDocumentRequest(owner=DOCUMENT_OWNER_USER, name="x"), context),
    ):
        with pytest.raises(PermissionDenied, match="pawl-user"):
            await call
