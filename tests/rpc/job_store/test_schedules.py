"""Schedules over real gRPC and a real database: each due time fires once despite concurrency and changes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import InvalidField, RequestIdReused, ScheduleExists, ScheduleNotFound, Unreadable
from pawl.event.v1 import run_pb2, schedule_pb2
from pawl.job.v1 import ledger_pb2, schedules_pb2
from pawl.job.v1.schedules_pb2_grpc import ScheduleLedgerServiceStub
from pawl.job_store.ledger.store.leases import PostgresLeases
from tests.rpc.job_store.conftest import SLOTS, Replica, StartReplica
from tests.rpc.job_store.user import Translated, User, forwarded
from tests.rpc.refusals import raises

NOW = datetime.now(UTC)
STARTED, WAITING = schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED, schedule_pb2.SCHEDULE_FIRE_OUTCOME_WAITING
SKIPPED, REFUSED = schedule_pb2.SCHEDULE_FIRE_OUTCOME_SKIPPED, schedule_pb2.SCHEDULE_FIRE_OUTCOME_REFUSED


class Timer:
    def __init__(self, replica: Replica, user_id: str = "ann", *, credential_id: str = "local") -> None:
        self.replica = replica
        self.stub = Translated(ScheduleLedgerServiceStub(replica.channel))
        self.user_id = user_id
        self.caller = Principal(
            store_id=StoreId("acme"), user_id=UserId(user_id), credential_id=CredentialId(credential_id)
        )

    async def ask(self, method: str, **fields: Any) -> Any:
        return await translated(forwarded(self.replica.channel, self.caller, method, **fields))

    async def put(self, name: str = "watch", *, must_exist: bool = False, text: str = "look", **fields: Any) -> Any:
        fields = fields if "cron" in fields else {"interval_seconds": 3600} | fields
        definition = schedule_pb2.ScheduleDefinition(name=name, text=text, **fields)
        return (await self.ask("UpdateSchedule" if must_exist else "CreateSchedule", definition=definition)).schedule

    async def get(self, name: str = "watch") -> Any:
        return (await self.ask("GetSchedule", name=name)).schedule

    async def due(self, name: str = "watch") -> schedules_pb2.DueSchedule:
        request = schedules_pb2.GetDueScheduleRequest(store_id="acme", user_id=self.user_id, name=name)
        due: schedules_pb2.DueSchedule = (await self.stub.GetDueSchedule(request)).due
        return due

    async def pause(self, name: str = "watch", note: str = "", *, paused: bool = True) -> Any:
        asked = {"name": name, "note": note} if paused else {"name": name}
        return (await self.ask("PauseSchedule" if paused else "ResumeSchedule", **asked)).schedule

    async def delete(self, name: str = "watch") -> None:
        await self.ask("DeleteSchedule", name=name)

    async def claim(self, schedules_max: int = 64) -> list[schedules_pb2.DueSchedule]:
        return list(
            (await self.stub.ClaimSchedules(schedules_pb2.ClaimSchedulesRequest(schedules_max=schedules_max))).schedules
        )

    async def fire(
        self, due: schedules_pb2.DueSchedule, *, refusal: str = "", request_id: str = "", backfill_time: Any = None
    ) -> Any:
        """Fire a schedule, or return None if it has changed since it was claimed."""
        message = ledger_pb2.SubmitMessageRequest(
            store_id="acme",
            user_id=self.user_id,
            request_id=request_id,
            text=due.definition.text,
            conversation_key=due.definition.conversation_key,
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
        )
        response = await self.stub.FireSchedule(
            schedules_pb2.FireScheduleRequest(
                due=due,
                message=None if refusal else message,
                refusal=refusal,
                request_id=request_id,
                backfill_time=backfill_time,
            )
        )
        return response.fire if response.HasField("fire") else None

    async def past_times(self, seconds: float, name: str = "watch") -> list[Any]:
        """Return the past scheduled times between `seconds` ago and an hour from now."""
        request = schedules_pb2.GetDueScheduleRequest(store_id="acme", user_id=self.user_id, name=name)
        now = datetime.now(UTC)
        request.begin_time.FromDatetime(now - timedelta(seconds=seconds))
        request.end_time.FromDatetime(now + timedelta(hours=1))
        return list((await self.stub.GetDueSchedule(request)).past_times)

    async def trigger(self, name: str = "watch", **fields: Any) -> Any:
        return await self.fire(await self.due(name), **fields)

    async def make_due(self, seconds_ago: float = 0.0, name: str = "watch") -> None:
        """Make a schedule due in the past, because the database clock cannot be moved."""
        await self.replica.database.execute(
            "UPDATE job_store.schedules SET due_time = now() - $2::interval, claim_at = now() - $2::interval"
            " WHERE name = $1",
            name,
            timedelta(seconds=seconds_ago),
        )

    async def fire_due(self, seconds_ago: float = 0.0) -> Any:
        await self.make_due(seconds_ago)
        (due,) = await self.claim()
        return await self.fire(due)

    async def fires(self, name: str = "watch") -> list[int]:
        return [fire.outcome for fire in (await self.get(name)).fires]


@pytest.fixture
def timer(replica: Replica) -> Timer:
    return Timer(replica)


async def end(user: User, state: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_COMPLETED) -> None:
    owner = await user.take()
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    failure: Any = {"failure": run_pb2.RunFailure(message="no")} if state == run_pb2.RUN_STATE_FAILED else {}
    await owner.commit(state=state, **failure)


async def test_schedule_is_stored_once_under_its_name(timer: Timer, replica: Replica) -> None:
    made = await timer.put(cron="0 9 * * 1-5", time_zone="Europe/Berlin", labels={"of": "it"})
    assert await timer.put(cron="0 9 * * 1-5", time_zone="Europe/Berlin", labels={"of": "it"}) == made
    await raises(ScheduleExists, timer.put(cron="0 10 * * 1-5", time_zone="Europe/Berlin"))
    changed = await timer.put(cron="0 10 * * 1-5", must_exist=True)
    assert (changed.schedule_id, changed.definition.cron) == (made.schedule_id, "0 10 * * 1-5")
    await raises(ScheduleNotFound, timer.put("other", must_exist=True), Timer(replica, "bob").get())
    found = await timer.get()
    assert (found.definition.overlap, len(found.next_times)) == (schedule_pb2.SCHEDULE_OVERLAP_SKIP, 10)
    assert found.next_times[0] == found.next_time
    await timer.delete()
    await raises(ScheduleNotFound, timer.delete())


async def test_scheduled_time_fires_once_despite_concurrent_claims(start: StartReplica) -> None:
    timers = [Timer(await start()) for _ in range(2)]
    for number in range(20):
        await timers[0].put(f"s{number}")
        await timers[0].make_due(name=f"s{number}")
    claims = await asyncio.gather(*(timer.claim(10) for timer in timers))
    ids = [due.schedule_id for claim in claims for due in claim]
    assert len(set(ids)) == len(ids) == 20
    # Both processes fire all schedules, as if each had also claimed those of the other.
    for fired in await asyncio.gather(*(timer.fire(due) for timer in timers for claim in claims for due in claim)):
        assert fired is None or fired.outcome == STARTED
    assert [await timers[0].fires(f"s{number}") for number in range(20)] == [[STARTED]] * 20
    assert await timers[0].replica.database.fetchval("SELECT count(*) FROM job_store.runs") == 20
    assert await timers[1].claim() == []


async def test_claim_skips_a_schedule_that_is_being_changed(timer: Timer) -> None:
    for name in ("held", "free"):
        await timer.put(name)
        await timer.make_due(name=name)
    async with timer.replica.database.transaction() as connection:
        await connection.execute("SELECT FROM job_store.schedules WHERE name = 'held' FOR UPDATE")
        async with asyncio.timeout(60):
            assert [due.definition.name for due in await timer.claim()] == ["free"]
    assert [due.definition.name for due in await timer.claim()] == ["held"]


async def test_schedule_changed_while_it_fires_is_claimed_again_immediately(timer: Timer) -> None:
    await timer.put()
    await timer.make_due()
    (due,) = await timer.claim()
    await timer.put(text="look there", must_exist=True)
    assert await timer.fire(due) is None
    (again,) = await timer.claim()
    assert (again.expected_time, again.definition.text) == (due.expected_time, "look there")
    assert (await timer.fire(again)).outcome == STARTED
    await timer.delete()
    await raises(ScheduleNotFound, timer.fire(again))


async def test_cancel_policy_starts_the_new_run_once_the_previous_one_has_ended(timer: Timer, user: User) -> None:
    await timer.put(overlap=schedule_pb2.SCHEDULE_OVERLAP_CANCEL, conversation_key="one")
    first, second = await timer.fire_due(), await timer.fire_due()
    worker = await user.take(second.run_id)
    await worker.commit(state=run_pb2.RUN_STATE_RUNNING)
    waiting = await timer.fire_due()
    assert (waiting.outcome, waiting.reason) == (WAITING, "the previous run is being cancelled")
    assert {fire.run_id: fire.run_state for fire in (await timer.get()).fires if fire.run_id} == {
        first.run_id: run_pb2.RUN_STATE_CANCELLED,
        second.run_id: run_pb2.RUN_STATE_CANCELLING,
    }
    claim_at_once = "UPDATE job_store.schedules SET claim_at = now()"
    await timer.replica.database.execute(claim_at_once)
    assert await timer.claim() == [], "the run continues"
    (command,) = await worker.inbox()
    await worker.commit(consumed=[command.command_id], state=run_pb2.RUN_STATE_CANCELLED)
    await timer.replica.database.execute(claim_at_once)
    (due,) = await timer.claim()
    third = await timer.fire(due)
    assert await timer.fire(due) is None
    assert (third.outcome, third.due_time) == (STARTED, waiting.due_time)
    assert first.conversation_id == second.conversation_id == third.conversation_id


async def test_schedule_pauses_itself_after_ten_failures_in_a_row(timer: Timer, user: User) -> None:
    await timer.put()
    await timer.fire_due()
    await end(user, run_pb2.RUN_STATE_FAILED)
    await timer.fire_due()
    await end(user)
    for _ in range(9):
        await timer.make_due()
        (due,) = await timer.claim()
        assert (await timer.fire(due, refusal="AGENT_NOT_FOUND: no")).outcome == REFUSED
    assert not (await timer.get()).self_paused
    await timer.fire_due()
    await end(user, run_pb2.RUN_STATE_FAILED)
    assert (await timer.fire_due()).outcome == SKIPPED
    paused = await timer.get()
    assert (paused.self_paused, paused.pause_note) == (True, "10 runs in a row were refused or failed")
    assert (paused.HasField("next_time"), await timer.claim()) == (False, [])
    resumed = await timer.pause(paused=False)
    assert (resumed.self_paused, resumed.failures, resumed.pause_note) == (False, 0, "")
    assert (await timer.fire_due()).outcome == STARTED


async def test_scheduled_times_missed_during_a_pause_are_skipped(timer: Timer) -> None:
    await timer.put(interval_seconds=2)
    await timer.make_due(100.0)
    (due,) = await timer.claim()
    paused = await timer.pause(note="holidays")
    assert (paused.pause_note, paused.HasField("next_time")) == ("holidays", False)
    assert await timer.fire(due) is None
    assert (await timer.pause(note="more holidays")).pause_time == paused.pause_time
    assert (await timer.pause(paused=False)).next_time.ToDatetime(tzinfo=UTC) > NOW
    assert await timer.fires() == []


async def test_a_triggered_schedule_fires_immediately_and_only_once(timer: Timer) -> None:
    before = await timer.put(overlap=schedule_pb2.SCHEDULE_OVERLAP_ALLOW)
    await timer.pause()
    first = await timer.trigger(request_id="r1")
    assert (first.outcome, first.triggered, await timer.trigger(request_id="r1")) == (STARTED, True, first)
    stale = await timer.due()
    assert (await timer.trigger(request_id="r2")).run_id != first.run_id
    assert await timer.fire(stale, request_id="r3") is None
    await timer.put("other", text="something else")
    await raises(RequestIdReused, timer.trigger("other", request_id="r1"))
    await timer.pause(paused=False)
    assert (await timer.get()).next_time == before.next_time


async def test_backfill_runs_past_scheduled_times_once_per_request(timer: Timer) -> None:
    before = await timer.put(interval_seconds=60)
    goes_on = await timer.trigger()
    times = await timer.past_times(180.0)
    assert [time.seconds % 60 for time in times] == [0, 0, 0]
    for _ in range(2):
        for number, time in enumerate(times):
            await timer.trigger(request_id=f"r{number}", backfill_time=time)
    schedule = await timer.get()
    first, *fires = reversed(schedule.fires)
    assert first.run_id == goes_on.run_id
    assert [(fire.due_time, fire.outcome, fire.triggered) for fire in fires] == [(t, STARTED, True) for t in times]
    assert await timer.replica.database.fetchval("SELECT count(*) FROM job_store.runs") == 4
    assert (schedule.next_time, schedule.failures) == (before.next_time, 0)
    # The previous run of the due fire is still the earlier one.
    assert (await timer.due()).last_run_id == goes_on.run_id


async def test_schedule_stops_firing_when_its_api_key_is_revoked_or_removed(replica: Replica) -> None:
    timer = Timer(replica, credential_id="key_1")
    await replica.database.execute(
        "INSERT INTO job_store.api_keys (key_id, digest, change, name, store_id, user_id, roles, decides_for_users,"
        " create_time, create_user_id, create_credential_id, request_id, request_hash)"
        " VALUES ('key_1', '\\x01', 1, '', 'acme', 'ann', '{}', false, now(), '', '', '', '\\x')"
    )
    await timer.put(overlap=schedule_pb2.SCHEDULE_OVERLAP_ALLOW)
    assert (await timer.fire_due()).outcome == STARTED
    await replica.database.execute("UPDATE job_store.api_keys SET revoke_time = now()")
    refused = await timer.fire_due()
    assert (refused.outcome, refused.reason.partition(":")[0]) == (REFUSED, "PERMISSION_DENIED")
    await replica.database.execute("DELETE FROM job_store.api_keys")
    assert (await timer.fire_due()).outcome == REFUSED
    await Timer(replica).put(overlap=schedule_pb2.SCHEDULE_OVERLAP_ALLOW, must_exist=True)
    assert (await timer.fire_due()).outcome == STARTED


async def test_claim_expires_after_the_clock_goes_back(timer: Timer) -> None:
    await timer.put()
    await timer.make_due()
    (due,) = await timer.claim()
    assert await timer.claim() == []
    await PostgresLeases(timer.replica.database, SLOTS, crashes_max=1).bring_forward(5.0)
    assert await timer.claim() == [due]


async def test_a_claim_returns_the_time_of_the_next_poll(timer: Timer) -> None:
    asked = schedules_pb2.ClaimSchedulesRequest(schedules_max=1)
    assert (await timer.stub.ClaimSchedules(asked)).wait_seconds == 5.0
    await timer.put()
    await timer.make_due(-0.9)
    assert (await timer.stub.ClaimSchedules(asked)).wait_seconds <= 0.9


async def test_unreadable_schedule_does_not_delay_others(timer: Timer, replica: Replica) -> None:
    ids = {}
    for name in ("moved", "broken", "good"):
        ids[name] = (await timer.put(name, cron="0 3 * * *", time_zone="Europe/Berlin")).schedule_id
        await timer.make_due(name=name)
    change = "UPDATE job_store.schedules SET definition = $2 WHERE name = $1"
    packed = await replica.database.fetchval("SELECT definition FROM job_store.schedules WHERE name = 'moved'")
    await replica.database.execute(change, "moved", packed.replace(b"Europe/Berlin", b"Europe/Xanadu"))
    await replica.database.execute(change, "broken", b"")
    with capture_logs() as logs:
        assert [due.definition.name for due in await timer.claim()] == ["good"]
    assert {each["id"] for each in logs if each["event"] == "row.unreadable"} == {ids["moved"], ids["broken"]}
    assert not await timer.claim(), "all of them are claimed"
    shown = await timer.get("moved")
    assert (shown.definition.time_zone, list(shown.next_times)) == ("Europe/Xanadu", [])
    assert [each.definition.name for each in (await timer.ask("ListSchedules")).schedules] == ["good", "moved"]
    await raises(
        Unreadable,
        *(timer.get("broken"), timer.pause("broken")),
        match="'broken' is damaged and cannot be read: delete it",
    )
    await timer.delete("broken")
    await timer.pause("moved")
    await raises(InvalidField, timer.pause("moved", paused=False), match="Xanadu")
