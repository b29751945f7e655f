"""Mailboxes of triggers over gRPC, with a real database.

Only one process reads each mailbox, and each e-mail fires its trigger only once.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pawl.chassis.identity.auth import user_principal
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied, TriggerNotFound
from pawl.event.v1 import run_pb2
from pawl.event.v1.trigger_pb2 import LeasedMailbox, MailboxSource, MailPosition, TriggerDefinition
from pawl.job.v1 import ledger_pb2, triggers_pb2
from pawl.job_store.triggers import store
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_schedules import SKIPPED, STARTED, end
from tests.rpc.job_store.test_triggers import Hook
from tests.rpc.job_store.user import User
from tests.rpc.refusals import raises


class Box(Hook):
    def __init__(self, replica: Replica, user_id: str = "ann") -> None:
        super().__init__(replica, user_id)
        self.act_as("admin")

    def act_as(self, role: str, store_id: str = "acme") -> None:
        self.caller = user_principal(StoreId(store_id), UserId(self.user_id), frozenset({role}))

    async def make(self, *, must_exist: bool = False, **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "host": "mx.example",
            "username": "ann",
            "password_secret": "mail",
            "senders": ["@a.example"],
        }
        definition = TriggerDefinition(name="orders", text="look", mailbox=MailboxSource(**(defaults | fields)))
        response = await self.ask("UpdateTrigger" if must_exist else "CreateTrigger", definition=definition)
        assert not getattr(response, "secret", "")
        return response.trigger

    async def leased(self, reader_id: str = "reader") -> list[LeasedMailbox]:
        return list((await self.stub.LeaseMailboxes(triggers_pb2.LeaseMailboxesRequest(reader_id=reader_id))).mailboxes)

    async def made(self, uid: int = 10, **fields: Any) -> LeasedMailbox:
        await self.make(**fields)
        (mailbox,) = await self.leased()
        await self.report(mailbox, uid=uid)
        return mailbox

    async def report(self, mailbox: LeasedMailbox, reason: str = "", *, validity: int = 7, uid: int = 0) -> None:
        await self.stub.ReportMailbox(
            triggers_pb2.ReportMailboxRequest(
                store_id=mailbox.store_id,
                trigger_id=mailbox.trigger_id,
                generation=mailbox.generation,
                position=None if reason else MailPosition(uid_validity=validity, uid=uid),
                reason=reason,
            )
        )

    async def deliver_mail(
        self, mailbox: LeasedMailbox, uid: int, *, skipped: str = "", refusal: str = "", validity: int = 7
    ) -> Any:
        checked = await self.stub.CheckMailbox(
            triggers_pb2.CheckMailboxRequest(
                store_id=mailbox.store_id, trigger_id=mailbox.trigger_id, generation=mailbox.generation
            )
        )
        if not checked.HasField("due"):
            return triggers_pb2.FireTriggerResponse()
        message = ledger_pb2.SubmitMessageRequest(
            store_id="acme", user_id="ann", text="look", policy=ledger_pb2.MESSAGE_POLICY_QUEUE
        )
        request = triggers_pb2.FireTriggerRequest(
            due=checked.due,
            event=triggers_pb2.TriggerEvent(event_id=f"f0.{validity}.{uid}"),
            message=None if skipped or refusal else message,
            refusal=refusal,
            skipped=skipped,
            mail=MailPosition(uid_validity=validity, uid=uid),
        )
        return await self.stub.FireTrigger(request)

    async def position(self) -> tuple[int, int]:
        (mailbox,) = await self.leased()
        return mailbox.position.uid_validity, mailbox.position.uid


@pytest.fixture
def box(replica: Replica) -> Box:
    return Box(replica)


async def test_one_process_reads_a_mailbox_until_its_lease_ends(box: Box) -> None:
    await box.make()
    (mailbox,) = await box.leased("one")
    assert (mailbox.store_id, mailbox.user_id, mailbox.name) == ("acme", "ann", "orders")
    assert (mailbox.mailbox.port, mailbox.mailbox.folder, mailbox.position) == (993, "INBOX", MailPosition())
    assert await box.leased("other") == []
    assert await box.leased("one") == [mailbox], "a lease is renewed"
    await box.replica.database.execute("UPDATE job_store.triggers SET claim_at = now()")
    assert (await box.leased("other"), await box.leased("one")) == ([mailbox], [])
    await box.pause()
    assert await box.leased("other") == []


async def test_each_process_leases_at_most_its_limit_of_mailboxes(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LEASED_MAX", 2)
    for number in range(5):
        box.act_as("admin", f"store-{number}")
        await box.make()
    readers = ("one", "two", "three")
    for reader in ("one", "one", "two", "two"):
        await box.leased(reader)
    first = [{each.store_id for each in await box.leased(reader)} for reader in readers]
    assert ([len(stores) for stores in first], len(set().union(*first))) == ([2, 2, 1], 5)
    for seconds in (5, 15):
        past = timedelta(seconds=seconds)
        await box.replica.database.execute("UPDATE job_store.triggers SET claim_at = claim_at - $1::interval", past)
        for _ in range(2):
            again = [{each.store_id for each in await box.leased(reader)} for reader in readers]
            assert again == first, "also if leases are not renewed"


async def test_each_email_fires_once_even_if_it_is_delivered_repeatedly(box: Box) -> None:
    """The firing and the position are stored in one transaction, so a repeated delivery has no effect."""
    mailbox = await box.made()
    first = await box.deliver_mail(mailbox, 11)
    assert (first.fire.outcome, first.fire.event_id, first.duplicate) == (STARTED, "f0.7.11", False)
    assert (await box.deliver_mail(mailbox, 11)).duplicate
    skipped = await box.deliver_mail(mailbox, 12, skipped="bob@b.example is not one of the allowed senders")
    assert skipped.fire.outcome == SKIPPED
    # After the events are deleted, the position still detects duplicates.
    await box.replica.database.execute("DELETE FROM job_store.trigger_events")
    for uid in (11, 12, 3):
        again = await box.deliver_mail(mailbox, uid)
        assert (again.duplicate, again.HasField("fire")) == (True, False)
    assert (await box.deliver_mail(mailbox, 13, validity=6)).duplicate
    assert await box.count_runs() == 1
    await box.report(mailbox, uid=99)
    assert await box.position() == (7, 12), "within one UIDVALIDITY only deliveries move the position"
    await box.report(mailbox, validity=8, uid=3)
    assert await box.position() == (8, 3)


async def test_email_that_pauses_the_trigger_is_delivered_after_the_pause(box: Box, user: User) -> None:
    mailbox = await box.made()
    for uid in range(11, 40):
        await box.deliver_mail(mailbox, uid, skipped="no")
    for uid in range(40, 49):
        await box.deliver_mail(mailbox, uid, refusal="AGENT_NOT_FOUND: no")
    await box.deliver_mail(mailbox, 49)
    await end(user, run_pb2.RUN_STATE_FAILED)
    assert not (await box.deliver_mail(mailbox, 50)).HasField("fire")
    assert (await box.get()).self_paused
    assert await box.leased() == []
    await box.pause(paused=False)
    (mailbox,) = await box.leased()
    assert (mailbox.position.uid, (await box.deliver_mail(mailbox, 50)).fire.outcome) == (49, STARTED)


async def test_a_trigger_whose_mailbox_is_unreachable_for_12_hours_pauses_itself(box: Box) -> None:
    mailbox = await box.made()
    await box.report(mailbox, "no answer")
    shown = await box.get()
    assert (shown.unreachable_reason, shown.self_paused) == ("no answer", False)
    await box.report(mailbox)
    assert not (await box.get()).HasField("unreachable_time")
    await box.report(mailbox, "no answer")
    await box.replica.database.execute("UPDATE job_store.triggers SET unreachable_time = now() - interval '12 h'")
    await box.report(mailbox, "wrong password")
    shown = await box.get()
    assert (shown.self_paused, shown.pause_note) == (True, "the mailbox was unreachable for 12 hours: wrong password")
    assert await box.leased() == []
    resumed = await box.pause(paused=False)
    assert (resumed.HasField("unreachable_time"), resumed.unreachable_reason) == (False, "")


async def test_a_gap_in_reports_restarts_the_12_hours_before_a_pause(box: Box) -> None:
    """Two failures far apart do not pause a trigger if no process read its mailbox in between."""
    mailbox = await box.made()
    elapse = """
    UPDATE job_store.triggers SET unreachable_time = unreachable_time - $1::interval,
    unreachable_report_time = unreachable_report_time - $1::interval
    """
    for hours, is_paused in ((13, False), (3, False), *[(1, False)] * 11, (1, True)):
        await box.report(mailbox, "no answer")
        await box.replica.database.execute(elapse, timedelta(hours=hours))
        await box.report(mailbox, "no answer")
        assert (await box.get()).self_paused is is_paused, hours


async def test_a_new_folder_resets_the_position_but_the_same_folder_keeps_it(box: Box) -> None:
    old = await box.made()
    await box.deliver_mail(old, 11)
    for same in ({"folder": "inbox", "port": 993, "poll_seconds": 15}, {"host": "MX.example"}):
        await box.make(must_exist=True, **same)
    assert (await box.position(), (await box.deliver_mail(old, 12)).HasField("fire")) == ((7, 11), False)
    await box.report(old, "stale")
    assert not (await box.get()).HasField("unreachable_time")
    await box.make(must_exist=True, folder="Orders")
    assert await box.position() == (0, 0)
    await raises(InvalidField, box.put("orders", must_exist=True))
    await raises(InvalidField, box.rotate(), match="with a webhook have a secret")
    await raises(TriggerNotFound, box.check({}, trigger_id=old.trigger_id))


async def test_only_an_admin_resumes_a_mailbox(box: Box) -> None:
    """The mailbox's password belongs to the store, so a former admin must not be able to use it."""
    await box.make()
    await box.pause()
    box.act_as("member")
    await raises(PermissionDenied, box.pause(paused=False), match="admin")
    assert await box.leased() == []
    box.act_as("admin")
    await box.pause(paused=False)
    assert len(await box.leased()) == 1


async def test_error_for_an_invalid_mailbox_names_the_field(box: Box) -> None:
    wrong: list[tuple[str, Any]] = [
        ("host", ""),
        ("port", 65536),
        ("username", "ann\r\nx"),
        ("username", ""),
        ("password_secret", ""),
        ("folder", 'a"b'),
        ("folder", "a\\b"),
        ("poll_seconds", 14),
        ("authserv_id", "a b"),
        ("senders", ["x"]),
        ("senders", ["a@b.example"] * 101),
    ]
    for field, value in wrong:
        refused = await raises(InvalidField, box.make(**{field: value}))
        assert refused.metadata["field"] == f"definition.mailbox.{field}", value
    await raises(InvalidField, box.make(senders=[]), match="identify trusted senders")


async def test_unreadable_trigger_does_not_delay_other_mailboxes(box: Box, replica: Replica) -> None:
    await box.make()
    box.act_as("admin", "other")
    await box.make()
    await replica.database.execute("UPDATE job_store.triggers SET definition = '' WHERE store_id = 'acme'")
    assert [each.store_id for each in await box.leased()] == ["other"]
