"""The log of a run as AG-UI events: nothing stays open or is repeated, and a reload shows the same."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext, suppress
from typing import Any, cast
from unittest.mock import ANY, AsyncMock, MagicMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent.v1 import agent_pb2, conversation_pb2, jobs_pb2
from pawl.errors import (
    CallNotFound,
    ConversationErased,
    ConversationNotFound,
    DigestMismatch,
    InvalidField,
    RunNotFound,
)
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.event.v1 import conversation_pb2 as event_conversation_pb2
from pawl.gateway.agui import input as agui_input
from pawl.gateway.agui.events import Fold, message_of
from pawl.gateway.agui.follow import changes
from pawl.gateway.agui.http import _Plan, _Thread
from pawl.gateway.services import Services
from tests.golden import GAP, LOG, TOLD
from tests.tables import not_explained
from tests.unit.gateway.agui_page import Page


def call(call_id: str, state: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"callId": call_id, "runId": "run", "toolName": "tool", "state": f"CALL_STATE_{state}"}
    found |= {"argumentsJson": encoded({"a": 1}), "approval": {"digest": "d1"}}
    if state == "DELEGATED":
        found["childRunId"] = f"child_{call_id}"
    if state in {"SUCCEEDED", "FAILED", "REJECTED"}:
        found |= {"result": {"contentJson": encoded({"state": state})}}
    return found | more


def encoded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def folded(fold: Fold, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events for a log whose entries are numbered from 1."""
    return [event for seq, each in enumerate(log, 1) for event in fold.fold({"seq": str(seq)} | each)]


@pytest.mark.parametrize("legacy", [False, True])
def test_an_interrupt_is_preceded_by_all_messages(*, legacy: bool) -> None:
    fold = Fold("run", legacy=legacy, before=[{"id": "mine", "role": "user", "content": "hello"}])
    called = {"callChanged": {"call": call("call_1", "AWAITING_APPROVAL")}}
    folded(fold, [{"roundStarted": {"round": 1}}, {"outputDelta": {"text": "May I?"}}, called])
    asked = agui_input.outcome(agui_input.read({"threadId": "t", "runId": "r", "messages": []}), WAITING)
    assert asked is not None
    *_, snapshot, end = fold.finish(asked)
    assert (snapshot["type"], end["outcome"]["type"]) == ("MESSAGES_SNAPSHOT", "interrupt")
    messages = snapshot["messages"]
    shown = [(each["role"], each["content"], each.get("toolCalls", [{}])[0].get("id")) for each in messages]
    assert shown == [("user", "hello", None), ("assistant", "May I?", "call_1")]


WAITING: dict[str, Any] = {
    "runId": "run",
    "state": "RUN_STATE_WAITING",
    "waits": ["WAIT_KIND_APPROVAL", "WAIT_KIND_BUDGET"],
    "tokenBudget": "100",
    "tokensNeeded": "7",
    "pendingCalls": [
        call("call_1", "AWAITING_APPROVAL", deadlineTime="2026-05-02T00:00:00.5Z"),
        call("call_2", "ASKED", question={"question": "Which?\u202e", "options": ["a"]}),
        call("call_3", "OFFERED"),
    ],
}


def resume(**more: Any) -> list[agui_input.Resume]:
    payloads: list[Any] = [{"approved": True}, "a", {"tokens": 9}]
    found = dict(zip([each["id"] for each in agui_input.interrupts(WAITING)], payloads, strict=True)) | more
    return [agui_input.Resume(interrupt_id=name, status="resolved", payload=payload) for name, payload in found.items()]


def test_a_complete_resume_is_converted_to_decisions() -> None:
    expiry = "If no one decides by 2026-05-02 00:00 UTC, the call does not run, or the deadline is extended once."
    assert [each["message"] for each in agui_input.interrupts(WAITING)][:2] == [
        f"Allow tool to run?\n\n{expiry}",
        "Which?<U+202E>",  # hidden characters are marked
    ]
    answers_given = agui_input.answers(resume(), WAITING, [], {})
    decisions = [(each["kind"], each.get("digest")) for each in answers_given.decisions]
    assert decisions == [("DECISION_KIND_APPROVE", "d1"), ("DECISION_KIND_ANSWER", ANY)]
    assert (answers_given.tokens, answers_given.stops, answers_given.late) == ({"run": 9}, [], [])


def test_late_answers_are_reported_and_unknown_answers_are_refused() -> None:
    assert agui_input.answers(resume(**{"call_9.d": None}), WAITING, [], {"call_9": {}}).late == ["call_9.d"]
    decision = {"userId": "bob", "kind": "DECISION_KIND_REJECT"}
    known = {"call_9": {"toolName": "pay", "state": "CALL_STATE_EXPIRED"}, "call_8": {"toolName": "pay"}}
    known["call_8"]["approval"] = {"decision": decision}  # type: ignore[assignment]  # JSON
    assert agui_input.settled("call_9.d", known) == "pay was already settled: expired."
    assert agui_input.settled("call_8.d", known) == "pay was already decided by bob: reject."
    rows: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"call_9.d": None}, CallNotFound),
        ({"call_1.old": {"approved": True}}, DigestMismatch),
    ]
    for answers, error in rows:
        with pytest.raises(error):
            agui_input.answers(resume(**answers), WAITING, [], {})


def test_an_incomplete_duplicate_or_invalid_resume_is_refused() -> None:
    """Of two contradictory answers, neither counts."""
    for index, given_ in enumerate([resume()] * 3):
        half = [*given_[:index], *given_[index + 1 :]]
        twice = agui_input.Resume(interrupt_id=given_[index].interrupt_id, status="cancelled")
        with pytest.raises(InvalidField, match=twice.interrupt_id.partition(".")[0]):
            agui_input.answers(half, WAITING, [], {})
        for both in ([*given_, twice], [twice, *given_]):
            with pytest.raises(InvalidField, match="once"):
                agui_input.answers(both, WAITING, [], {})
    with pytest.raises(InvalidField, match="tokens"):
        agui_input.answers(resume(**{"budget.run.100": {"tokens": 2**63}}), WAITING, [], {})
    first, *rest = resume()
    with pytest.raises(InvalidField, match="must be resolved or cancelled"):
        agui_input.answers([agui_input.Resume(interrupt_id=first.interrupt_id, status="maybe"), *rest], WAITING, [], {})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists))
def test_any_payload_is_accepted_or_refused(payload: Any) -> None:
    for name in [each["id"] for each in agui_input.interrupts(WAITING)]:
        with suppress(InvalidField):
            agui_input.answers(resume(**{name: payload}), WAITING, [], {})


def test_a_run_waiting_for_the_page_ends_as_its_protocol_requires() -> None:
    run = WAITING | {"waits": [], "pendingCalls": WAITING["pendingCalls"][2:]}
    body = {"threadId": "t", "runId": "r", "messages": []}
    modern = agui_input.outcome(agui_input.read(body | {"protocolVersion": "1.0"}), run)
    assert modern is not None
    assert modern["outcome"] == {"type": "success", "pendingToolCallIds": ["call_3"]}
    assert agui_input.outcome(agui_input.read(body), run) == {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"}
    assert agui_input.outcome(agui_input.read(body), run, {"call_3"}) is None


def test_late_joiners_also_see_that_a_run_needs_an_operator() -> None:
    fold, attention = Fold("run", legacy=False), {"reason": "ATTENTION_REASON_UNKNOWN_OUTCOME"}
    changed = {"runId": "run", "state": "RUN_STATE_NEEDS_ATTENTION", "attention": attention}
    events = fold.fold({"seq": "1", "runChanged": {"run": changed}})
    assert events == [{"type": "CUSTOM", "name": "pawl.needs_attention", "value": attention}]
    assert fold.attach()[-1:] == events


def test_the_error_for_an_invalid_request_names_the_field() -> None:
    def read(wrong: dict[str, Any]) -> None:
        body = {"threadId": "t", "runId": "r", "messages": [{"id": "1", "role": "user", "content": "go"}]}
        found = agui_input.read(body | wrong)
        agui_input.options_of(found)
        agui_input.start(found, found.messages[0])

    rows: list[tuple[dict[str, Any], str]] = [
        ({"runId": 3}, "not a valid RunAgentInput: .*runId"),
        ({"runId": ""}, "runId must not be empty"),
        ({"tools": [{"name": "show", "description": "d", "parameters": 3}]}, "of show must be a JSON Schema"),
        ({"forwardedProps": {"pawl": {"nope": 1}}}, "forwardedProps.pawl: .*nope"),
    ]
    assert [(wrong, says) for wrong, says in rows if not_explained(InvalidField, read, [(wrong, says)])] == []
    assert (
        not_explained(
            InvalidField, agui_input.read_stop, [({"threadId": "t"}, "threadId and runId are required: .*run_?[iI]d")]
        )
        == []
    )


@pytest.mark.parametrize(("named", "is_its"), [("r1", True), ("run_1", True), ("r0", False), ("run_0", False)])
async def test_cancel_stops_only_the_run_it_names(named: str, *, is_its: bool) -> None:
    """A request to stop may arrive after its run has ended, while the next run is active."""
    services, body = MagicMock(), {"threadId": "t", "runId": "r1"}
    message = {"id": "m", "role": "user", "content": "go"}
    started = agui_input.start(agui_input.read(body | {"messages": [message]}), message)
    runs = [run_pb2.Run(run_id="run_1", labels=started["labels"])]
    answers = [conversation_pb2.GetConversationResponse(), agent_pb2.ListRunsResponse(runs=runs)]
    last = RunNotFound() if named == "run_0" else agent_pb2.CancelRunResponse(run=runs[0])
    services.call = AsyncMock(side_effect=[*answers, last])
    stop = agui_input.read_stop(body | {"runId": named})
    thread = _Thread(services, (), agui_input.read(body | {"messages": []}))
    with nullcontext() if is_its else pytest.raises(RunNotFound):
        assert (await thread.stop(stop.run_id))["run"]["runId"] == "run_1"


@pytest.mark.parametrize("conversation_id", ["conv_1", "conv_2"])
async def test_cancel_stops_only_a_job_of_its_thread(conversation_id: str) -> None:
    services, conversation = MagicMock(), event_conversation_pb2.Conversation(conversation_id="conv_1")
    job = jobs_pb2.BackgroundJob(job_id="run_7", conversation_id=conversation_id)
    stopping = jobs_pb2.BackgroundJob(job_id="run_7", state=run_pb2.RUN_STATE_CANCELLING)
    services.call = AsyncMock(
        side_effect=[
            conversation_pb2.GetConversationResponse(conversation=conversation),
            agent_pb2.ListRunsResponse(),
            jobs_pb2.GetJobResponse(job=job),
            jobs_pb2.StopJobResponse(job=stopping),
        ]
    )
    thread = _Thread(services, (), agui_input.read({"threadId": "t", "runId": "run_7", "messages": []}))
    with nullcontext() if conversation_id == "conv_1" else pytest.raises(RunNotFound):
        assert (await thread.stop("run_7"))["job"]["state"] == "RUN_STATE_CANCELLING"


async def test_activities_include_open_jobs_and_jobs_that_the_page_still_shows() -> None:
    services = MagicMock()
    definition = run_pb2.Job(arguments_json=b'{"shelves": 60}')
    opened = jobs_pb2.BackgroundJob(job_id="run_2", conversation_id="conv_1", definition=definition)
    found: list[Any] = [
        jobs_pb2.ListJobsResponse(jobs=[opened]),
        jobs_pb2.GetJobResponse(
            job=jobs_pb2.BackgroundJob(
                job_id="run_1", conversation_id="conv_1", state=run_pb2.RUN_STATE_CANCELLED, last_result="secret"
            )
        ),
    ]
    services.call = AsyncMock(side_effect=found)
    shown = {"role": "activity", "activityType": "pawl.job", "content": {}}
    messages = [shown | {"id": "run_1"}, shown | {"id": "run_2"}]
    body = {"threadId": "t", "runId": "r", "protocolVersion": "1.0", "messages": messages}
    thread = _Thread(services, (), agui_input.read(body))
    thread._conversation_id = "conv_1"
    assert await thread._jobs() == []
    events = await thread._activities()
    assert [(each["type"], each["messageId"]) for each in events] == [
        ("ACTIVITY_SNAPSHOT", "run_2"),
        ("ACTIVITY_SNAPSHOT", "run_1"),
    ]
    assert events[0]["content"]["definition"] == {"argumentsJson": '{"shelves": 60}'}, "as text, not base64"
    content = events[1]["content"]
    assert (content["state"], "lastResult" in content) == ("RUN_STATE_CANCELLED", False)


async def test_disconnecting_after_the_last_event_does_not_stop_the_run() -> None:
    """A front end may close its connection at the last event, when the run waits for its user."""
    asked = call_pb2.Call(call_id="call_1", state=call_pb2.CALL_STATE_AWAITING_APPROVAL)
    run = run_pb2.Run(run_id="run", state=run_pb2.RUN_STATE_WAITING, last_seq=1, pending_calls=[asked])
    run.waits.append(run_pb2.WAIT_KIND_APPROVAL)
    event = event_pb2.RunEvent(seq=1, run_changed=event_pb2.RunChanged(run=run))

    async def watch(*_: object) -> Any:
        yield agent_pb2.WatchRunResponse(events=[event])

    services = MagicMock(watch=watch)
    services.call = AsyncMock(side_effect=[ConversationNotFound(), agent_pb2.GetRunResponse(run=run)])
    body: dict[str, Any] = {"threadId": "t", "runId": "r", "messages": []}
    thread = _Thread(services, (), agui_input.read(body))
    empty = [event["type"] async for event in thread.events(await thread.plan())]
    assert empty == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "RUN_FINISHED"]
    body["messages"] = [{"id": "1", "role": "user", "content": "go"}]
    thread = _Thread(services, (), agui_input.read(body))
    *_, last = [event async for event in thread.events(_Plan({"runId": "run", "conversationId": "c"}, is_new=True))]
    await thread.leave("run")
    assert (last["outcome"]["type"], services.call.await_count) == ("interrupt", 2)


class FollowedThread:
    """Services with a conversation of one message and these runs; a watch sends the responses that are left."""

    def __init__(self, *responses: conversation_pb2.WatchConversationResponse) -> None:
        self.responses, self.cursors = list(responses), list[str]()

    async def watch(self, name: str, request: Any, _: object) -> Any:
        if name.endswith("WatchRun"):
            for seq, changed in enumerate(log_of(request.run_id), 1):
                yield agent_pb2.WatchRunResponse(events=[event_pb2.RunEvent(seq=seq, **changed)])
            return
        self.cursors.append(request.after)
        while self.responses:
            yield self.responses.pop(0)
        raise ConversationErased

    async def call(self, name: str, request: Any, *_: object, **__: object) -> Any:
        match name.rpartition("/")[2]:
            case "GetConversation":
                return conversation_pb2.GetConversationResponse(
                    conversation=event_conversation_pb2.Conversation(conversation_id="c")
                )
            case "ListMessages":
                said = message_pb2.Message(
                    message_id="m", run_id="r1", role=message_pb2.ROLE_ASSISTANT, text="Started."
                )
                return agent_pb2.ListMessagesResponse(messages=[said])
            case "ListJobs":
                return jobs_pb2.ListJobsResponse()
            case method:
                return getattr(agent_pb2, f"{method}Response")()


def log_of(run_id: str) -> list[dict[str, Any]]:
    said = message_pb2.Message(message_id=f"of {run_id}", run_id=run_id, role=message_pb2.ROLE_ASSISTANT, text="Done.")
    ended = run_pb2.Run(run_id=run_id, state=run_pb2.RUN_STATE_COMPLETED, last_seq=2)
    return [
        {"message_added": event_pb2.MessageAdded(message=said)},
        {"run_changed": event_pb2.RunChanged(run=ended)},
    ]


def changed(cursor: str, *runs: run_pb2.Run) -> conversation_pb2.WatchConversationResponse:
    items = [conversation_pb2.ConversationItem(run=run) for run in runs]
    return conversation_pb2.WatchConversationResponse(cursor=cursor, items=items)


def run_of(run_id: str, state: str, **more: Any) -> run_pb2.Run:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "conversation_id": "c",
        "generation": 1,
        "last_seq": 1,
        "job": {},
        **more,
    }
    return run_pb2.Run(state=run_pb2.RunState.Value(f"RUN_STATE_{state}"), **fields)


async def test_follow_streams_each_turn_of_a_job_once_as_its_own_run() -> None:
    """Left out: turns that have not started, were stopped or said nothing, child runs, and runs of AG-UI requests."""
    mine = run_of("mine", "RUNNING", labels={"agui.run": "r1"})
    silent = run_of("silent", "COMPLETED")
    child = run_of("child", "RUNNING", parent_run_id="mine")
    services = FollowedThread(
        changed("1", mine, child, run_of("a", "QUEUED"), run_of("stopped", "CANCELLED")),
        changed("2", run_of("a", "RUNNING")),
        changed(
            "3", run_of("a", "COMPLETED", output_text="Done."), silent, run_of("b", "COMPLETED", output_text="Done.")
        ),
    )
    body = {"threadId": "t", "runId": "f", "messages": [], "protocolVersion": "1.0"}
    thread, pages = _Thread(cast("Services", services), (), agui_input.read(body)), dict[str, Page]()
    await thread.find()
    with pytest.raises(ConversationErased):
        async for event in thread.follow():
            if event["type"] == "RUN_STARTED":
                pages[event["runId"]] = page = Page()
            page.take(json.loads(json.dumps(event)))
    assert [(name, page.ended, [each["content"] for each in page.messages]) for name, page in pages.items()] == [
        ("f", True, ["Started."]),
        ("a", True, ["Started.", "Done."]),
        ("b", True, ["Started.", "Done."]),
    ]
    assert services.cursors == ["", "2", "3"]


async def test_a_turn_that_waited_is_streamed_again_when_it_continues() -> None:
    services = FollowedThread(
        changed("1", run_of("a", "WAITING", last_seq=3), run_of("b", "WAITING", last_seq=3)),
        changed("2", run_of("a", "WAITING", last_seq=3)),
        changed("3", run_of("a", "RUNNING", last_seq=4)),
        changed("4", run_of("a", "COMPLETED", last_seq=4, output_text="Paid."), run_of("b", "CANCELLED", last_seq=4)),
    )
    shown, states = dict[str, int](), list[tuple[str, str]]()
    with pytest.raises(ConversationErased):
        async for run in changes(cast("Services", services), (), "c", shown):
            shown[run["runId"]] = int(run["lastSeq"])
            states.append((run["runId"], run["state"].removeprefix("RUN_STATE_")))
    assert states == [("a", "WAITING"), ("b", "WAITING"), ("a", "RUNNING"), ("b", "CANCELLED")]


async def test_follow_streams_the_progress_of_a_job_between_turns_as_an_activity() -> None:
    def job(fraction: float) -> conversation_pb2.WatchConversationResponse:
        shown = jobs_pb2.BackgroundJob(
            job_id="j", state=run_pb2.RUN_STATE_RUNNING, progress=run_pb2.JobProgress(fraction=fraction)
        )
        return conversation_pb2.WatchConversationResponse(items=[conversation_pb2.ConversationItem(job=shown)])

    services = FollowedThread(job(0.25), job(0.25), job(0.5))
    thread = _Thread(cast("Services", services), (), agui_input.read({"threadId": "t", "runId": "f", "messages": []}))
    await thread.find()
    page, fractions = Page(), list[float]()
    with pytest.raises(ConversationErased):
        async for event in thread.follow():
            if event["type"] == "RUN_STARTED":
                page.expect_run()
            page.take(json.loads(json.dumps(event)))
            if event["type"] == "ACTIVITY_SNAPSHOT":
                fractions.append(event["content"]["progress"]["fraction"])
    assert (page.ended, fractions, services.cursors) == (True, [0.25, 0.5], [""])


async def test_follow_is_refused_if_the_request_has_messages_or_the_thread_has_none() -> None:
    body: dict[str, Any] = {"threadId": "t", "runId": "f", "forwardedProps": {"pawl": {"follow": True}}}
    for more in ({"messages": [{"id": "1", "role": "user", "content": "go"}]}, {"messages": [], "resume": resume()}):
        with pytest.raises(InvalidField, match="follow is read-only"):
            agui_input.options_of(msgspec.convert(body | more, agui_input.Input))
    missing = MagicMock(call=AsyncMock(side_effect=ConversationNotFound()))
    with pytest.raises(ConversationNotFound):
        await _Thread(missing, (), agui_input.read(body | {"messages": []})).find()


def page_of(events: list[dict[str, Any]]) -> Page:
    page = Page()
    for event in [{"type": "RUN_STARTED"}, *events]:
        page.take(json.loads(json.dumps(event)))
    return page


def shown(page: Page) -> list[dict[str, str]]:
    results = {each["toolCallId"]: each["content"] for each in page.of("tool")}
    content: list[dict[str, str]] = []
    for message in page.messages:
        if message["role"] == "reasoning" and message["content"]:
            content.append({"reasoning": message["content"]})
        if message["role"] == "assistant" and message["content"]:
            content.append({"text": message["content"]})
        for call in message.get("toolCalls", ()):
            function = call["function"]
            named = {"call": call["id"], "tool": function["name"], "arguments": function["arguments"]}
            content.append(named | {"result": results[call["id"]]})
    return content


def test_the_end_of_a_run_is_reported_as_the_protocol_version_requires() -> None:
    """Each row has a final state, and the expected event type and outcome or error code."""
    body, failure = {"threadId": "t", "runId": "r", "messages": []}, {"message": "no answer", "reason": "MODEL_FAILED"}
    rows: list[tuple[str, dict[str, Any], str, Any]] = [
        ("COMPLETED", {}, "RUN_FINISHED", None),
        ("COMPLETED", {"protocolVersion": "1.0"}, "RUN_FINISHED", {"type": "success"}),
        ("CANCELLED", {}, "RUN_ERROR", "CANCELLED"),
        ("CANCELLED", {"protocolVersion": "1.0"}, "RUN_FINISHED", {"type": "cancelled"}),
        ("FAILED", {}, "RUN_ERROR", "MODEL_FAILED"),
        ("EXPIRED", {}, "RUN_ERROR", "EXPIRED"),
    ]
    for state, more, kind, how in rows:
        run = {"runId": "run", "state": f"RUN_STATE_{state}", "failure": failure}
        end = agui_input.outcome(agui_input.read(body | more), run)
        assert end is not None
        assert (end["type"], end.get("outcome", end.get("code"))) == (kind, how), state


def test_child_runs_edits_and_void_attempts_are_shown() -> None:
    child: dict[str, Any] = {"round": 1, "childRunId": "child", "argumentsJson": encoded({"a": 2})}
    message = {"messageId": "m", "runId": "run", "role": "ROLE_ASSISTANT", "reasoning": "so", "text": "Done."}
    log: list[dict[str, Any]] = [
        {"roundStarted": {"round": 1, "modelAttempt": 1}},
        {"outputDelta": {"round": 1, "modelAttempt": 1, "reasoning": "hm"}},
        {"roundStarted": {"round": 1, "modelAttempt": 2}},
        {"callChanged": {"call": call("call_1", "AWAITING_APPROVAL", round=1)}},
        {"callChanged": {"call": call("call_1", "DELEGATED", **child)}},
        {"callChanged": {"call": call("call_1", "SUCCEEDED", **child)}},
        {"messageAdded": {"message": message}},
    ]
    fold = Fold("run", legacy=False)
    events = folded(fold, log)
    assert [event["type"] for event in events if event["type"].startswith("SUBAGENT")] == [
        "SUBAGENT_STARTED",
        "SUBAGENT_FINISHED",
    ]
    assert fold.fold({"seq": str(len(log))} | log[-1]) == [], "a repeated event changes nothing"
    called = {"call": "call_1", "tool": "tool", "arguments": '{"a": 2}', "result": '{"state": "SUCCEEDED"}'}
    assert shown(page_of(events)) == [called, {"reasoning": "so"}, {"text": "Done."}]


@pytest.mark.parametrize("legacy", [False, True])
def test_ag_ui_matches_the_golden_log(legacy: bool) -> None:
    """The log is also whole for a client that joins mid-run."""
    log = json.loads(LOG.read_text())
    for index in range(len(log)):
        fold = Fold(log[0]["runId"], legacy=legacy)
        before = [event for each in log[:index] for event in fold.fold(each)]
        events = [
            *(fold.attach() if index > 1 else before),
            *(event for each in log[index:] for event in fold.fold(each)),
        ]
        assert shown(page_of(events)) == json.loads(TOLD.read_text()), index


def test_answers_have_the_same_ids_in_the_stream_and_in_a_later_snapshot() -> None:
    """A page that compares a snapshot with what it shows can tell which answers it has missed."""
    log = json.loads(LOG.read_text())
    fold = Fold(log[0]["runId"], legacy=False)
    live = page_of([event for each in log for event in fold.fold(each)])
    messages = [each["messageAdded"]["message"] for each in log if "messageAdded" in each]
    answers = [
        [each["id"] for each in found if each["role"] == "assistant" and each["content"]]
        for found in (live.messages, [each for message in messages for each in message_of(message, {})])
    ]
    assert answers[0] == answers[1] != []


def test_ag_ui_matches_the_golden_log_after_a_gap() -> None:
    gap, last = json.loads(GAP.read_text()), json.loads(LOG.read_text())[-1]
    fold = Fold(gap["runId"], legacy=False)
    assert shown(page_of([*fold.gap(gap), *fold.fold(last)])) == json.loads(TOLD.read_text())
