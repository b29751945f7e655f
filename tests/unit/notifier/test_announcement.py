"""The lifecycle events that become notifications, and the texts of those notifications (NOTE-1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, is_id
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.inbox.announcement import BODY_BYTES_MAX, TITLE_BYTES_MAX, drafts_of, job_end_of, need_resolved_by
from pawl.notifier.inbox.intake import ATTEMPTS_MAX, Intake, read_event
from pawl.notifier.inbox.rules import (
    Draft,
    EventId,
    Inbox,
    NotificationKind,
    PoisonEvent,
    ResolvedNeed,
    notification_id,
    shown,
)
from pawl.notifier.inbox.store import Added, PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.server.process.metrics import Metrics
from tests.tables import not_refused
from tests.unit.notifier.events import TIME, asked, ended_job, event, of

OPERATOR, SUPERSEDED = run_pb2.STOP_CAUSE_OPERATOR, run_pb2.STOP_CAUSE_SUPERSEDED
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
BOTH = [run_pb2.WAIT_KIND_ANSWER, run_pb2.WAIT_KIND_APPROVAL]
TRIAGE = {"name": "triage", "version": 1}
QUARANTINED = run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_QUARANTINED)


def announced(message: event_pb2.RunEvent) -> Draft:
    (draft,) = drafts_of(message, ())
    return draft


def test_only_events_that_concern_the_user_become_notifications() -> None:
    rows: list[tuple[str, dict[str, Any], NotificationKind, str]] = [
        ("completed", {}, NotificationKind.RUN_COMPLETED, "Run completed"),
        ("failed", {"failure": {"message": "It is down."}}, NotificationKind.RUN_FAILED, "Run failed: It is down."),
        ("cancelled", {}, NotificationKind.RUN_CANCELLED, "Run cancelled"),
        ("cancelled", {"stop_cause": OPERATOR}, NotificationKind.RUN_CANCELLED, "Run ended by an operator"),
        ("expired", {}, NotificationKind.RUN_EXPIRED, "Run expired"),
        ("completed", {"workflow": TRIAGE}, NotificationKind.RUN_COMPLETED, "Workflow triage completed"),
        ("waiting", {"waits": BOTH, "workflow": TRIAGE}, NotificationKind.INPUT_NEEDED, "Workflow triage is waiting"),
        ("waiting", {"waits": BOTH}, NotificationKind.INPUT_NEEDED, "Run is waiting for your approval and your answer"),
        (
            "waiting",
            {"waits": [run_pb2.WAIT_KIND_BUDGET]},
            NotificationKind.INPUT_NEEDED,
            "Run is waiting for more tokens",
        ),
        ("waiting", {"waits": [99]}, NotificationKind.INPUT_NEEDED, "Run is waiting for input"),
        ("needs_attention", {}, NotificationKind.ATTENTION_NEEDED, "Run stopped: it is unknown whether"),
        (
            "needs_attention",
            {"attention": QUARANTINED},
            NotificationKind.ATTENTION_NEEDED,
            "Run stopped: its workers died",
        ),
    ]
    for kind, run, notification_kind, title in rows:
        draft = announced(of(kind, output_text="So far", **run))
        assert (draft.kind, draft.title[: len(title)]) == (notification_kind, title)
        assert draft.body.startswith("So far")
        assert ("If no one decides in time" in draft.body) is (run.get("waits") == BOTH)
        found = (draft.inbox.store_id, draft.inbox.user_id, draft.run_id, draft.event_id, draft.create_time)
        assert found == ("acme", "ann", "run_1", "evt_1", TIME)
    ignored = [of(kind) for kind in ("queued", "running", "cancelling", "invented_later")]
    ignored += [of("cancelled", stop_cause=SUPERSEDED), of("completed", generation=1), event("warning")]
    ignored += [ended_job(kind=kind) for kind in ("completed", "failed", "cancelled", "expired")]
    ignored += [of("completed", parent_run_id="run_0"), of("waiting", waits=[run_pb2.WAIT_KIND_AGENT])]
    ignored += [of("waiting", waits=[wait]) for wait in (run_pb2.WAIT_KIND_EVENT, run_pb2.WAIT_KIND_JOB)]
    assert [drafts_of(message, ()) for message in ignored] == [[]] * len(ignored)
    waits = [run_pb2.WAIT_KIND_AGENT, run_pb2.WAIT_KIND_APPROVAL]
    assert announced(of("waiting", waits=waits, parent_run_id="run_0")).kind is NotificationKind.INPUT_NEEDED


def test_a_notification_id_is_derived_from_its_event() -> None:
    ids = [notification_id(EventId("e" * length)) for length in (64, 64, 63)]
    assert (is_id(ids[0]), ids[0] == ids[1], ids[1] == ids[2]) == (True, True, False)
    assert announced(of("completed")).notification_id == notification_id(EventId("evt_1"))


def test_text_is_truncated_to_a_byte_limit_between_characters() -> None:
    draft = announced(of("failed", failure={"message": "ä\n" * 5000}, output_text="\0\u202e" + "ü" * 5000))
    assert ("\n" in draft.title, draft.body[:9], draft.body[-4:]) == (False, "<U+202E>ü", "ü...")
    assert TITLE_BYTES_MAX - 4 <= len(draft.title.encode()) <= TITLE_BYTES_MAX
    assert BODY_BYTES_MAX - 4 <= len(draft.body.encode()) <= BODY_BYTES_MAX


def test_a_jobs_end_belongs_to_the_conversation_to_which_it_reports() -> None:
    """ASYNC-5: job ends that need no report are not announced."""
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("completed", {}, "completed"),
        ("failed", {"failure": {"message": "full"}}, "failed: full"),
        ("expired", {}, "expired: no answer in time"),
        ("cancelled", {"stop_cause": OPERATOR}, "was ended by an operator"),
    ]
    for kind, run, title in rows:
        draft = job_end_of(ended_job(kind=kind, **run))
        assert draft is not None
        assert (draft.kind, draft.title) == (NotificationKind.JOB_ENDED, f"book_flight in the background {title}")
        assert (draft.body, draft.run_id, draft.conversation_id) == ("done", "run_1", "conv_2")
    silent = ended_job()
    silent.run_changed.run.job.reports = run_pb2.JOB_REPORTS_NONE
    ignored = [of("completed"), silent, ended_job(reports_to=""), *(ended_job(kind=kind) for kind in NO_ENDS)]
    assert {job_end_of(message) for message in ignored} == {None}


NO_ENDS = ("cancelled", "waiting")
APPROVERS = [UserId("ann"), UserId("bob"), UserId("eve"), UserId("bob")]


def test_approvers_are_notified_without_details_of_the_conversation() -> None:
    """HITL-4: users are notified about their own runs by another event."""
    drafts = drafts_of(asked(preview="An e-mail to bob"), APPROVERS)
    assert [draft.inbox.user_id for draft in drafts] == ["bob", "eve"]
    assert {draft.kind for draft in drafts} == {NotificationKind.APPROVAL_NEEDED}
    end = "If no one decides by 2026-05-02 00:00 UTC, the call does not run, or the deadline is extended once."
    body = f"An e-mail to bob\n\n{end}"
    assert {(draft.title, draft.body) for draft in drafts} == {("ann's send_email awaits your approval", body)}
    (long,) = drafts_of(asked(preview="ü" * 5000), APPROVERS[1:2])
    assert len(long.body.encode()) <= BODY_BYTES_MAX
    assert long.body.endswith(body[len("An e-mail to bob") :]), "only the preview is cut"
    assert {(draft.run_id, draft.call_id, draft.conversation_id) for draft in drafts} == {("run_1", "call_1", "conv_1")}
    assert {shown(draft).conversation_id for draft in drafts} == {""}
    ids = [draft.notification_id for draft in drafts]
    assert (ids, len(set(ids))) == ([draft.notification_id for draft in drafts_of(asked(preview="x"), APPROVERS)], 2)
    (other,) = drafts_of(asked(by="bob"), APPROVERS)
    assert (other.inbox.user_id, other.body.partition("\n")[0]) == ("eve", "category SENSITIVE")
    assert drafts_of(asked(), []) == []


def test_an_escalated_request_notifies_all_approvers_and_the_user() -> None:
    """D6: the user's notification shows the conversation."""
    drafts = drafts_of(asked(escalated=True), APPROVERS)
    assert [(draft.inbox.user_id, draft.title) for draft in drafts] == [
        ("bob", "ann's send_email still awaits your approval: no decision in time"),
        ("eve", "ann's send_email still awaits your approval: no decision in time"),
        ("ann", "Run is still waiting for an approval of send_email: no decision in time"),
    ]
    assert (drafts[-1].kind, shown(drafts[-1]).conversation_id) == (NotificationKind.INPUT_NEEDED, "conv_1")


def test_an_approval_of_a_workflow_has_no_tool() -> None:
    event = asked()
    event.call_changed.call.approval.cause = "workflow"
    (draft,) = drafts_of(event, APPROVERS[1:2])
    assert draft.title == "ann's workflow awaits your approval"


def test_a_call_that_asks_a_user_by_name_notifies_only_that_user() -> None:
    question = asked()
    question.call_changed.call.state = call_pb2.CALL_STATE_ASKED
    question.call_changed.call.question.question = "Well?"
    for change, title in ((asked(preview="Pay?"), "awaits your approval"), (question, "asks you a question")):
        change.call_changed.call.asked_user_id = "kim"
        (draft,) = drafts_of(change, APPROVERS)
        assert (draft.inbox.user_id, draft.kind) == ("kim", NotificationKind.DECISION_NEEDED)
        assert (draft.title, draft.body.partition("\n")[0] in {"Pay?", "Well?"}) == (f"ann's workflow {title}", True)
        assert (draft.call_id, shown(draft).conversation_id) == ("call_1", "")
        settled = need_resolved_by(change)
        assert settled is not None
        assert settled.call_id == "call_1"
        change.call_changed.call.asked_user_id = "ann"
        assert drafts_of(change, APPROVERS) == [], "the change of the run notifies its user"
    assert drafts_of(of("waiting", waits=[run_pb2.WAIT_KIND_PERSON]), APPROVERS) == []
    approvers = asked()
    approvers.call_changed.call.asked_user_id = ""
    assert {draft.inbox.user_id for draft in drafts_of(approvers, APPROVERS)} == {"bob", "eve"}


def test_state_changes_settle_user_requests_while_run_ends_settle_approvals() -> None:
    over = ResolvedNeed(store_id=StoreId("acme"), run_id=RunId("run_1"), time=TIME)
    of_call = ResolvedNeed(store_id=StoreId("acme"), run_id=RunId("run_1"), time=TIME, call_id=CallId("call_1"))
    settled = asked()
    settled.call_changed.from_state = settled.call_changed.call.state
    settled.call_changed.call.state = call_pb2.CALL_STATE_RUNNABLE
    assert need_resolved_by(of("running")) == over
    assert need_resolved_by(of("completed")) == replace(over, run_ended=True)
    assert (need_resolved_by(asked()), need_resolved_by(settled)) == (of_call, of_call), "for that call only"
    settled.call_changed.from_state = call_pb2.CALL_STATE_RUNNING
    assert (need_resolved_by(settled), need_resolved_by(paused())) == (None, None)


def paused(user_id: str = "ann") -> event_pb2.RunEvent:
    starter = event_pb2.StarterPaused(name="orders\n", user_id=user_id, note="10 fires failed")
    made = event_pb2.RunEvent(store_id="acme", event_id="evt_1", type="trigger.paused", starter_paused=starter)
    made.time.FromDatetime(TIME)
    return made


def test_a_paused_trigger_notifies_its_user() -> None:
    """NOTE-1: the title gives the reason."""
    draft = announced(paused())
    assert draft.title == "Your trigger orders has paused itself: 10 fires failed"
    assert (draft.inbox.user_id, draft.run_id, draft.conversation_id) == ("ann", "", "")


def test_invalid_events_are_rejected() -> None:
    """I13: an event whose store differs from the store in its subject is invalid too."""
    subject = "pawl.v1.acme.lifecycle.waiting"
    good = [of("completed"), asked(), paused()]
    assert [read_event(subject, message.SerializeToString()) for message in good] == good
    bad = [of("completed"), asked(), asked(), of("completed"), asked(), paused("a.b")]
    bad[0].run_changed.run.user_id = "x" * 65
    bad[1].call_changed.call.user_id = ""
    bad[2].call_changed.call.deadline_time.seconds = -(10**12)
    bad[3].store_id = "other"
    bad[4].time.seconds = 10**12
    data = [b"\xff\xff\xff", *(message.SerializeToString() for message in bad)]
    assert not_refused(PoisonEvent, lambda each: read_event(subject, each), data) == []


# Events are acknowledged after their notification is stored, and no event blocks another.


class ScriptedMessage(Msg):
    def __init__(self, data: bytes, store: BrittleStore, *, attempt: int = 1) -> None:
        self.subject = "pawl.v1.acme.lifecycle.event"
        self.data = data
        self.headers = {"traceparent": TRACEPARENT}
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
        self._check()
        # As in the database once a run waits for a person.
        parked = self.parked | {draft.conversation_id for draft in self.drafts if draft.kind == "input_needed"}
        return {each for each in conversations if each[1] in parked}

    async def mark_resolved(self, over: Sequence[ResolvedNeed]) -> None:
        self._check()
        self.over += over

    def _check(self) -> None:
        if self.unavailable or self.broken:
            raise DependencyUnavailable

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        self._check()
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
    assert scene.store.drafts[0].traceparent == TRACEPARENT


@pytest.mark.parametrize(
    ("fault", "events", "answers"),
    [
        ("", [(b"\xff", 1), (of("completed", "a"), 1)], ["rejected", "accepted"]),
        ("", [(of("completed", "bad"), 1), (of("completed", "a"), 1)], ["retry in 1", "accepted"]),
        ("", [(of("completed", "bad"), ATTEMPTS_MAX)], ["rejected"]),
        ("unavailable", [(of("completed", "a"), 1), (of("completed", "b"), 1000)], ["retry in 1", "retry in 30"]),
        ("broken", [(of("completed", "a"), ATTEMPTS_MAX), (of("completed", "b"), 1000)], ["retry in 30"] * 2),
        ("broken", [(ended_job("c", reports_to="conv_1"), 1)], ["retry in 1"]),
    ],
    ids=["poison", "not storable", "not storable at its last attempt", "no database", "store fault", "job end"],
)
async def test_an_event_is_rejected_only_if_it_is_poison_or_has_been_tried_too_often(
    scene: Scene, fault: str, events: list[tuple[Any, int]], answers: list[str]
) -> None:
    """I20: neither blocks other events. Without a database, or if the store fails, events are retried without limit."""
    scene.store.unavailable, scene.store.broken = fault == "unavailable", fault == "broken"
    deliveries = [scene.delivery(content, attempt=attempt) for content, attempt in events]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [[answer] for answer in answers]
    counts = [(scene.count(outcome) or 0) for outcome in ("rejected", "notified")]
    assert counts == [answers.count("rejected"), answers.count("accepted")]


async def test_an_approval_event_is_acknowledged_after_all_its_notifications(scene: Scene) -> None:
    deliveries = [scene.delivery(asked("a", escalated=True)), scene.delivery(of("completed", "b"))]
    await scene.intake.take(deliveries)
    assert [delivery.answers for delivery in deliveries] == [["accepted"], ["accepted"]]
    assert [draft.inbox.user_id for draft in scene.store.drafts] == ["bob", "eve", "ann", "ann"]
    assert deliveries[0].stored_when_answered == 4


async def test_every_event_settles_the_requests_it_resolves(scene: Scene) -> None:
    events = [of("waiting", "a"), of("running", "a"), asked("b")]
    await scene.intake.take([*[scene.delivery(each) for each in (*events, event("warning"))], scene.delivery(b"\xff")])
    assert (scene.store.over, len(scene.store.drafts)) == (list(map(need_resolved_by, events)), 3)


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
