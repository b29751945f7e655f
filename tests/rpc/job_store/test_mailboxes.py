"""Mailboxes of triggers over real gRPC and a real database: each mail fires once, and what cannot be read is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from pawl.agent_loop.adapters.trigger_ledger import TriggerLedgerClient
from pawl.errors import InvalidField, InvalidId, PermissionDenied, TriggerNotFound
from pawl.event.v1 import run_pb2, trigger_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job.v1 import triggers_pb2 as pb
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_schedules import SKIPPED, STARTED, end
from tests.rpc.job_store.test_triggers import Hook
from tests.rpc.job_store.user import User


class Box(Hook):
    """Speaks for an admin with a mailbox, and for the agent-loop that reads it."""

    def __init__(self, replica: Replica, user_id: str = "ann") -> None:
        super().__init__(replica, user_id)
        self.owner.user_roles.append("admin")

    async def make(
        self, *, name: str = "orders", must_exist: bool = False, uid: int = 10, validity: int = 7, **fields: Any
    ) -> Any:
        defaults: dict[str, Any] = {
            "host": "mx.example",
            "username": "ann",
            "password_secret": "mail",
            "senders": ["@a.example"],
        }
        mailbox = trigger_pb2.MailboxSource(**(defaults | fields))
        request = pb.PutTriggerRequest(
            owner=self.owner,
            definition=trigger_pb2.TriggerDefinition(name=name, text="look", mailbox=mailbox),
            must_exist=must_exist,
            place=pb.MailPlace(uid_validity=validity, uid=uid),
        )
        response = await self.stub.PutTrigger(request)
        assert response.secret == ""
        return response.trigger

    async def due(self, *, mailboxes_max: int = 8, busy: Sequence[str] = ()) -> list[pb.DueMailbox]:
        return list((await self.claimed(mailboxes_max=mailboxes_max, busy=busy)).mailboxes)

    async def claimed(self, *, mailboxes_max: int = 8, busy: Sequence[str] = ()) -> Any:
        return await self.stub.ClaimMailboxes(
            pb.ClaimMailboxesRequest(mailboxes_max=mailboxes_max, busy_store_ids=busy)
        )

    async def make_readable(self) -> pb.DueMailbox:
        await self.replica.database.execute("UPDATE job_store.triggers SET claim_at = now()")
        (due,) = await self.due()
        return due

    async def note(self, due: pb.DueMailbox, reason: str = "", **fields: Any) -> None:
        await self.stub.NoteMailbox(pb.NoteMailboxRequest(due=due.due, reason=reason, **fields))

    async def read(
        self, due: pb.DueMailbox, uid: int, *, skipped: str = "", refusal: str = "", validity: int = 7
    ) -> Any:
        is_no_run = bool(skipped or refusal)
        message = ledger_pb2.SubmitMessageRequest(
            store_id="acme", user_id="ann", text="look", policy=ledger_pb2.MESSAGE_POLICY_QUEUE
        )
        request = pb.FireTriggerRequest(
            due=due.due,
            event=pb.TriggerEvent(event_id=f"{validity}.{uid}"),
            message=None if is_no_run else message,
            refusal=refusal,
            skipped=skipped,
            mail=pb.MailPlace(uid_validity=validity, uid=uid),
        )
        return await self.stub.FireTrigger(request)

    async def seconds(self) -> float:
        found: float = await self.replica.database.fetchval(
            "SELECT extract(epoch FROM claim_at - now())::float8 FROM job_store.triggers"
        )
        return found


@pytest.fixture
def box(replica: Replica) -> Box:
    return Box(replica)


async def test_each_mail_fires_once_whoever_reads_it_and_however_long_ago(box: Box) -> None:
    await box.make()
    (due,) = await box.due()
    assert (due.place.uid_validity, due.place.uid) == (7, 10)
    assert await box.due() == []
    first = await box.read(due, 11)
    assert (first.fire.outcome, first.fire.event_id, first.duplicate) == (STARTED, "7.11", False)
    skipped = await box.read(due, 12, skipped="bob@b.example is not among the senders")
    assert skipped.fire.outcome == SKIPPED
    # Another one has read the same mails, and it is forgotten that they came.
    await box.replica.database.execute("DELETE FROM job_store.trigger_events")
    for uid in (11, 12, 3):
        again = await box.read(due, uid)
        assert (again.duplicate, again.HasField("fire")) == (True, False)
    assert (await box.read(due, 13, validity=6)).duplicate
    assert await box.count_runs() == 1
    await box.note(due)
    assert 30 < await box.seconds() <= 60
    assert (await box.make_readable()).place.uid == 12
    await box.note(due, has_more=True)
    assert await box.seconds() <= 0
    await box.note(due, place=pb.MailPlace(uid_validity=8, uid=3))
    renumbered = await box.make_readable()
    assert (renumbered.place.uid_validity, renumbered.place.uid) == (8, 3)


async def test_of_each_store_one_mailbox_is_claimed_at_a_time_and_of_busy_ones_none(box: Box) -> None:
    """However long those of one store are due, the next one of another store is among the first."""
    for number in range(3):
        await box.make(name=f"many-{number}")
    for store in ("other", "third"):
        box.owner.store_id = store
        await box.make()
    await box.replica.database.execute(
        "UPDATE job_store.triggers SET claim_at = now() - interval '1 h' * substr(name, 6)::int WHERE name ~ '^many'"
    )

    def told(found: pb.ClaimMailboxesResponse) -> list[tuple[str, str]]:
        return sorted((each.due.owner.store_id, each.due.definition.name) for each in found.mailboxes)

    found = await box.claimed(mailboxes_max=2)
    assert (len(found.mailboxes), found.wait_seconds) == (2, 0)
    assert told(found)[0] == ("acme", "many-2")
    found = await box.claimed(busy=["third"])
    assert told(found)[0] == ("acme", "many-1")
    assert {store for store, _ in told(found)} <= {"acme", "other"}
    assert found.wait_seconds == 0, "another one of a store that is not busy is due"
    found = await box.claimed(busy=["acme"])
    assert {store for store, _ in told(found)} <= {"other", "third"}
    found = await box.claimed(busy=["acme"])
    assert (told(found), found.wait_seconds) == ([], 1), "what is due of a busy store is not waited for"
    assert told(await box.claimed()) == [("acme", "many-0")]
    for busy in ([""], ["acme"] * 65):
        with pytest.raises((InvalidField, InvalidId)):
            await box.claimed(busy=busy)


async def test_mails_of_others_pause_nothing_and_a_mail_that_finds_it_pausing_is_read_later(
    box: Box, user: User
) -> None:
    await box.make()
    (due,) = await box.due()
    for uid in range(11, 40):
        await box.read(due, uid, skipped="no")
    for uid in range(40, 49):
        await box.read(due, uid, refusal="AGENT_NOT_FOUND: no")
    await box.read(due, 49)
    await end(user, run_pb2.RUN_STATE_FAILED)
    assert not (await box.read(due, 50)).HasField("fire")
    assert (await box.get()).self_paused
    await box.note(due)
    await box.replica.database.execute("UPDATE job_store.triggers SET claim_at = now() WHERE pause_time IS NULL")
    assert await box.due() == []
    await box.pause(paused=False)
    (due,) = await box.due()
    assert due.place.uid == 49
    assert (await box.read(due, 50)).fire.outcome == STARTED


async def test_a_mailbox_that_cannot_be_read_is_left_alone_for_longer_and_longer(box: Box) -> None:
    await box.make(poll_seconds=30)
    (due,) = await box.due()
    waits = []
    for number in range(19):
        await box.note(due, f"no answer {number}")
        waits.append(60 * math.ceil(await box.seconds() / 60))
        due = await box.make_readable()
    assert waits == [60, 120, 240, 480, 960, 1920, *[3600] * 13]
    shown = await box.get()
    assert (shown.unreachable_reason, shown.self_paused) == ("no answer 18", False)
    await box.note(due, "no answer 19")
    shown = await box.get()
    assert (shown.self_paused, shown.pause_note) == (True, "its mailbox could not be read 20 times: no answer 19")
    assert await box.due() == []
    resumed = await box.pause(paused=False)
    assert (resumed.HasField("unreachable_time"), resumed.unreachable_reason) == (False, "")
    (due,) = await box.due()
    await box.note(due, "again")
    await box.note(due)
    assert not (await box.get()).HasField("unreachable_time")


async def test_another_folder_is_read_from_its_end_and_the_same_from_where_it_was(box: Box) -> None:
    await box.make()
    (due,) = await box.due()
    await box.read(due, 11)
    await box.make(must_exist=True, uid=99, poll_seconds=15)
    old = due
    (due,) = await box.due()
    assert due.place.uid == 11
    assert not (await box.read(old, 12)).HasField("fire")
    await box.note(old, "stale")
    assert not (await box.get()).HasField("unreachable_time")
    for same in ({"folder": "INBOX"}, {"folder": "inbox", "port": 993}, {}):
        await box.make(must_exist=True, uid=99, **same)
    (due,) = await box.due()
    assert due.place.uid == 11, "however it is written"
    await box.make(must_exist=True, uid=99, validity=9, folder="Orders")
    (due,) = await box.due()
    assert (due.place.uid_validity, due.place.uid) == (9, 99)
    with pytest.raises(InvalidField):
        await box.put("orders", must_exist=True)
    with pytest.raises(InvalidField, match="no webhook"):
        await box.rotate()
    with pytest.raises(TriggerNotFound):
        await box.check({}, trigger_id=due.due.trigger_id)


async def test_only_an_admin_has_a_mailbox_go_on(box: Box) -> None:
    """Its password is a secret of the store: who was an admin once does not have it used for ever."""
    await box.make()
    await box.pause()
    box.owner.user_roles[:] = ["member"]
    with pytest.raises(PermissionDenied, match="admin"):
        await box.pause(paused=False)
    assert await box.due() == []
    await box.pause()
    box.owner.user_roles[:] = ["admin"]
    await box.pause(paused=False)
    assert len(await box.due()) == 1


async def test_what_cannot_be_a_mailbox_is_refused_with_its_field(box: Box) -> None:
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
        with pytest.raises(InvalidField) as refused:
            await box.make(**{field: value})
        assert refused.value.metadata["field"] == f"definition.mailbox.{field}", value
    with pytest.raises(InvalidField, match="whose mails count"):
        await box.make(senders=[])


async def test_each_folder_of_a_mailbox_numbers_its_mails_for_itself(box: Box) -> None:
    """A mail fires whose number a mail of another folder had."""
    ledger, ids = TriggerLedgerClient(box.replica.channel), list[str]()
    for folder in ("Orders", "Archive"):
        await box.make(must_exist=bool(ids), folder=folder)
        (due,), _ = await ledger.claim_mailboxes(8)
        ids.append(due.trigger.folder_id)
    assert len({*ids, ""}) == 3
