"""Events are acknowledged after their notification is stored, and no event blocks another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import event_pb2
from pawl.notifier.inbox.announcement import need_resolved_by
from pawl.notifier.inbox.intake import ATTEMPTS_MAX, Intake
from pawl.notifier.inbox.rules import Draft, Inbox, PoisonEvent, ResolvedNeed
from pawl.notifier.inbox.store import Added, PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.server.process.metrics import Metrics
from tests.unit.notifier.events import asked, ended_job, event, of


class ScriptedMessage(Msg):
    def __init__(self, data: bytes, store: BrittleStore, *, attempt: int = 1) -> None:
        self.subject = "pawl.v1.acme.lifecycle.event"
        self.data = data
        self._store = store
        self._attempt = attempt
        self.answers: list[str] = []
        self.stored_when_answered = 0

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(num_delivered=self._attempt)

    async def ack(self) -> None:
        self.stored_when_answered = len(self._store.drafts)
        self.answers.append("accepted")

    async def nak(self, delay: float | None = None) -> None:
        self.answers.append(f"retry in {delay:g}")

    async def term(self) -> None:
        self.answers.append("rejected")


class BrittleStore(PostgresStore):
    """The store methods that the intake uses; it can be unavailable, and fails on drafts of `run_bad`."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []
        self.over: list[ResolvedNeed] = []
        self.unavailable = False
        self.broken = False
        self.parked: set[str] = set()

    async def waiting(
        self, conversations: Collection[tuple[Inbox, ConversationId]]
    ) -> AbstractSet[tuple[Inbox, ConversationId]]:
        if self.unavailable or self.broken:
            raise DependencyUnavailable
        # As in the database once a run waits for a person.
        parked = self.parked | {draft.conversation_id for draft in self.drafts if draft.kind == "input_needed"}
        return {each for each in conversations if each[1] in parked}

    async def mark_resolved(self, over: Sequence[ResolvedNeed]) -> None:
        if self.unavailable or self.broken:
            raise DependencyUnavailable
        self.over += over

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        if self.unavailable or self.broken:
            raise DependencyUnavailable
        return {store_id: [UserId("bob"), UserId("eve")] for store_id in store_ids}

    async def add(self, drafts: Sequence[Draft]) -> Added:
        if self.unavailable:
            raise DependencyUnavailable
        if any(draft.run_id == "run_bad" for draft in drafts):
            raise PoisonEvent("this row cannot be stored")
        if self.broken:
            raise RuntimeError("nothing can be stored")
        self.drafts += drafts
        return Added(notifications=len(drafts), deliveries=0)


class Scene:
    def __init__(self) -> None:
        self.store = BrittleStore()
        self.metrics = Metrics("test")
        self.woken = 0
        self.intake = Intake(self.store, PrometheusCounters(self.metrics), on_new=self._wake)

    def count(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("pawl_test_events_total", {"outcome": outcome})

    def _wake(self, _added: Added) -> None:
        self.woken += 1

    def delivery(self, content: event_pb2.RunEvent | bytes, *, attempt: int = 1) -> ScriptedMessage:
        data = content if isinstance(content, bytes) else content.SerializeToString()
        return ScriptedMessage(data, self.store, attempt=attempt)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_an_event_is_accepted_only_after_its_notification_is_stored(scene: Scene) -> None:
    ignored = [scene.delivery(of("queued", "a")), scene.delivery(event("warning"))]
    await scene.intake.take(ignored)
    assert [delivery.answers for delivery in ignored] == [["accepted"], ["accepted"]]
    assert (scene.store.drafts, scene.woken) == ([], 0)
    delivery = scene.delivery(of("completed", "a"))
    await scene.intake.take([delivery])
    assert (delivery.answers, delivery.stored_when_answered, scene.woken) == (["accepted"], 1, 1)


async def test_a_poison_event_is_rejected_immediately_and_blocks_no_other(scene: Scene) -> None:
    """I20: it is not retried."""
    poison, good = scene.delivery(b"\xff"), scene.delivery(of("completed", "a"))
    await scene.intake.take([poison, good])
    assert (poison.answers, good.answers) == (["rejected"], ["accepted"])
    assert (scene.count("rejected"), scene.count("notified")) == (1, 1)


async def test_an_event_that_cannot_be_stored_is_eventually_rejected(scene: Scene) -> None:
    """I20: it is retried until its last attempt."""
    bad, good = scene.delivery(of("completed", "bad")), scene.delivery(of("completed", "a"))
    await scene.intake.take([bad, good])
    assert (bad.answers, good.answers) == (["retry in 1"], ["accepted"])
    last = scene.delivery(of("completed", "bad"), attempt=ATTEMPTS_MAX)
    await scene.intake.take([last])
    assert last.answers == ["rejected"]


async def test_without_a_database_every_event_is_retried_without_limit(scene: Scene) -> None:
    scene.store.unavailable = True
    deliveries = [
        scene.delivery(of("completed", "a")),
        scene.delivery(of("completed", "b"), attempt=1000),
    ]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [
        ["retry in 1"],
        ["retry in 30"],
    ]


async def test_a_store_fault_never_loses_an_event(scene: Scene) -> None:
    scene.store.broken = True
    found = [
        (of("completed", "a"), ATTEMPTS_MAX),
        (of("completed", "b"), 1000),
        (ended_job("c", reports_to="conv_1"), 1),
    ]
    deliveries = [scene.delivery(content, attempt=attempt) for content, attempt in found]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [["retry in 30"], ["retry in 30"], ["retry in 1"]]


async def test_an_approval_event_is_acknowledged_after_all_its_notifications(scene: Scene) -> None:
    deliveries = [scene.delivery(asked("a", escalated=True)), scene.delivery(of("completed", "b"))]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [["accepted"], ["accepted"]]
    assert [draft.inbox.user_id for draft in scene.store.drafts] == ["bob", "eve", "ann", "ann"]
    assert deliveries[0].stored_when_answered == 4


async def test_every_event_settles_the_requests_it_resolves(scene: Scene) -> None:
    events = [of("waiting", "a"), of("running", "a"), asked("b")]
    deliveries = [scene.delivery(each) for each in (*events, event("warning"))]
    await scene.intake.take([*deliveries, scene.delivery(b"\xff")])
    assert scene.store.over == list(map(need_resolved_by, events))
    assert len(scene.store.drafts) == 3


async def test_a_jobs_end_sends_a_notification_only_if_its_conversation_waits(scene: Scene) -> None:
    """ASYNC-5: the wait may have started in the same batch."""
    parks = of("waiting", "parks")
    parks.conversation_id = "conv_3"
    scene.store.parked = {"conv_1"}
    found = [ended_job("a", reports_to="conv_1"), ended_job("b"), ended_job("c", reports_to="conv_3"), parks]
    deliveries = [scene.delivery(each) for each in found]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [["accepted"]] * 4
    assert [(draft.kind, draft.conversation_id) for draft in scene.store.drafts] == [
        ("input_needed", "conv_3"),
        ("job_ended", "conv_1"),
        ("job_ended", "conv_3"),
    ]
    assert deliveries[0].stored_when_answered == 3
    assert (scene.count("ignored"), scene.count("notified")) == (1, 3)
