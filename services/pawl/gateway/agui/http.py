"""The AG-UI endpoint. A thread is a conversation, and all state is in Pawl."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pawl.chassis.process import logs, tasks
from pawl.errors import (
    ConversationBusy,
    ConversationNotFound,
    Internal,
    InvalidArguments,
    PawlError,
    RunNotFound,
    Unavailable,
    by_reason,
)
from pawl.gateway.agui import events as agui
from pawl.gateway.agui import input as agui_input
from pawl.gateway.agui.events import Fold, Json, Names
from pawl.gateway.agui.follow import changes
from pawl.gateway.agui.input import Input
from pawl.gateway.login.callers import Callers
from pawl.gateway.services import PUBLIC, WATCH_RUN, Metadata, Services, write
from pawl.gateway.web.answers import answer, read_json
from pawl.gateway.web.streams import Event, Streams

_AGENT: Final = "pawl.agent.v1.AgentService"
_GET_CONVERSATION: Final = "pawl.agent.v1.ConversationService/GetConversation"
_LIST_JOBS: Final = "pawl.agent.v1.JobService/ListJobs"
_GET_JOB: Final = "pawl.agent.v1.JobService/GetJob"
_STOP_JOB: Final = "pawl.agent.v1.JobService/StopJob"
# Maximum number of ended jobs whose activities are brought up to date.
_ENDED_JOBS_MAX: Final = 20
_DEADLINE_SECONDS: Final = 15.0
# Interval for checking whether a waiting run's child run needs input.
_POLL_SECONDS: Final = 2.0
_PAGES_MAX: Final = 20
_MESSAGE: Final = "msg_"
_JOB: Final = "run_"
_OPEN: Final = ["RUN_STATE_QUEUED", "RUN_STATE_RUNNING", "RUN_STATE_WAITING", "RUN_STATE_CANCELLING"]
_TAKEN: Final = frozenset({"RECEIPT_STATUS_ACCEPTED", "RECEIPT_STATUS_DUPLICATE"})

_log = logs.get_logger(__name__)


class _Plan(msgspec.Struct):
    """The run to stream, the interrupts and calls that the request answered, and notices about refused answers."""

    run: Json
    is_new: bool = False
    is_reload: bool = False
    done: set[str] = msgspec.field(default_factory=set)
    notices: list[Json] = msgspec.field(default_factory=list)


async def run(callers: Callers, services: Services, streams: Streams, bytes_max: int, request: Request) -> Response:
    """Handle `POST /agui` with a RunAgentInput: start a run, answer a run's interrupts, or stream an open run.

    With `follow`, stream the thread's turns that no request started.
    """
    metadata = callers.bearer(request)
    found = agui_input.read(await read_json(request, bytes_max))
    options = agui_input.options_of(found)
    thread = _Thread(services, metadata, found)
    if options.follow:
        await thread.find()
        return streams.respond(_events(thread.follow()))
    plan = await thread.plan()
    run_id = plan.run.get("runId", "")
    leave = (lambda: thread.leave(run_id)) if options.on_disconnect == "cancel" and run_id else None
    return streams.respond(_events(thread.events(plan)), on_leave=leave)


async def cancel(callers: Callers, services: Services, bytes_max: int, request: Request) -> Response:
    """Handle `POST /agui/cancel`: stop a thread's open run or job. Respond like CancelRun or StopJob."""
    metadata = callers.bearer(request)
    stop = agui_input.read_stop(await read_json(request, bytes_max))
    thread = _Thread(services, metadata, Input(thread_id=stop.thread_id, run_id=stop.run_id, messages=[]))
    return answer(await thread.stop(stop.run_id))


async def _events(source: AsyncGenerator[Json, None]) -> AsyncGenerator[Event, None]:
    try:
        async with contextlib.aclosing(source) as events:
            async for event in events:
                yield Event(data=event)
    except PawlError as error:
        yield Event(data={"type": "RUN_ERROR", "message": error.message, "code": error.reason or error.kind})
    except Exception:  # noqa: BLE001  # reported to the client as RUN_ERROR
        _log.exception("agui.failed")
        yield Event(data={"type": "RUN_ERROR", "message": Internal().message, "code": "INTERNAL"})


class _Thread:
    """A request about a thread, made with its caller's credential."""

    def __init__(self, services: Services, metadata: Metadata, found: Input, conversation_id: str = "") -> None:
        self._services = services
        self._metadata = metadata
        self._found = found
        self._conversation_id = conversation_id
        self._has_ended = False
        self._last_seq = 0
        self._open_jobs: list[Json] = []

    async def plan(self) -> _Plan:
        """Execute the request and return what to stream.

        Raises:
            InvalidField, CallNotFound, DigestMismatch: The answers do not match the open interrupts. Nothing was done.
            ConversationBusy: The request has a new message, but a run is waiting for answers. Nothing was done.
            PawlError: An error from the services.
        """
        found, message = self._found, self._found.message
        runs = await self._runs()
        label = agui_input.label_of(message["id"]) if message else ""
        mine = [run for run in runs if label and run.get("labels", {}).get("agui.message") == label]
        if message is not None and not mine and await self._is_known(message):
            message = None
        run = next(iter(mine or runs), None)
        run = None if run is None else await self._run(run["runId"])
        given = agui_input.tool_results(found, run.get("pendingCalls", ())) if run else []
        if given or found.resume:
            return await self._answer(run, given, message if not mine else None)
        if message is None or mine:
            return await self._reload(run)
        if run is not None and agui_input.outcome(found, run) is not None:
            raise ConversationBusy(
                "This thread's run is waiting for answers. Send them with `resume`, or stop the run."
            )
        return _Plan(await self._start(message), is_new=True)

    async def _start(self, message: Json) -> Json:
        run: Json = (await self._call("StartRun", agui_input.start(self._found, message)))["run"]
        self._conversation_id = run["conversationId"]
        return run

    async def events(self, plan: _Plan) -> AsyncGenerator[Json, None]:
        """Yield events until the run ends, or until it is waiting for the front end or the user."""
        for event in self._first_events(plan):
            yield event
        if not plan.run:
            yield {"type": "MESSAGES_SNAPSHOT", "messages": []}
            for each in await self._success_with_jobs(plan):
                yield each
            return
        run_id, watch = plan.run["runId"], PUBLIC[WATCH_RUN]
        fold, attached = await self._fold(plan), plan.is_new
        responses = self._services.watch(watch.name, watch.read({"runId": run_id}), self._metadata)
        waiting = asyncio.ensure_future(anext(responses, None))
        try:
            while True:
                await asyncio.wait({waiting}, timeout=_POLL_SECONDS)
                if waiting.done() and (response := waiting.result()) is not None:
                    for event in _folded(fold, write(response)):
                        if attached:
                            yield event
                    waiting = asyncio.ensure_future(anext(responses, None))
                if not attached and fold.seq >= int(plan.run.get("lastSeq", "0")):
                    attached = True
                    for event in fold.attach():
                        yield event
                if (end := await self._end(plan, fold)) is not None:
                    self._has_ended, self._last_seq = True, fold.seq
                    *closing, last = fold.finish(end)
                    for each in (*closing, *await self._activities(), last):
                        yield each
                    return
                if waiting.done() and waiting.result() is None:
                    raise Unavailable("The stream of events was interrupted. Try again.")
        finally:
            await tasks.end([waiting])
            await responses.aclose()

    async def find(self) -> None:
        """Find the thread's conversation.

        Raises:
            ConversationNotFound: The thread has no messages.
        """
        await self._runs()
        if not self._conversation_id:
            raise ConversationNotFound("This thread has no messages yet. Follow it after its first run.")

    async def follow(self) -> AsyncGenerator[Json, None]:
        """Yield a snapshot, then an AG-UI run for each turn that no AG-UI request started. Never ends.

        If a job changes between turns, the change is an AG-UI run that contains only the job's activity.
        """
        found, plan = self._found, _Plan({})
        for event in self._first_events(plan):
            yield event
        results = {call_id: message["id"] for call_id, message in found.results.items()}
        yield {"type": "MESSAGES_SNAPSHOT", "messages": await self._before("", found.user_ids, results)}
        *activities, last = await self._success_with_jobs(plan)
        for each in (*activities, last):
            yield each
        shown, jobs = dict[str, int](), {each["messageId"]: each for each in activities}
        async with contextlib.aclosing(
            changes(self._services, self._metadata, self._conversation_id, shown)
        ) as found_changes:
            async for change in found_changes:
                if "jobId" in change:
                    activity = agui.job_activity(change)
                    if jobs.get(change["jobId"]) != activity:
                        jobs[change["jobId"]] = activity
                        for each in (*self._first_events(plan), activity, self._success()):
                            yield each
                    continue
                asked = msgspec.structs.replace(found, run_id=change["runId"])
                turn = _Thread(self._services, self._metadata, asked, self._conversation_id)
                async with contextlib.aclosing(turn.events(_Plan(change))) as events:
                    async for event in events:
                        if event["type"] == "ACTIVITY_SNAPSHOT":
                            jobs[event["messageId"]] = event
                        yield event
                shown[change["runId"]] = max(turn._last_seq, int(change["lastSeq"]))

    async def leave(self, run_id: str) -> None:
        """Cancel the run if the client disconnected before the AG-UI run ended."""
        if not self._has_ended:
            await self._try_cancel(run_id)

    async def _try_cancel(self, run_id: str) -> None:
        try:
            await self._cancel(run_id)
        except PawlError as error:
            _log.warning("agui.not_cancelled", run_id=run_id, reason=error.reason)

    async def stop(self, run_id: str) -> Json:
        """Stop an open run or a job. `run_id` is its id in Pawl, or the id of the AG-UI run that started the run.

        Raises:
            RunNotFound: The thread does not have an open run or a job with this id.
        """
        label = agui_input.label_of(run_id)
        for run in await self._runs():
            if run_id == run["runId"] or label == run.get("labels", {}).get("agui.run"):
                return await self._cancel(run["runId"])
        if run_id.startswith(_JOB) and await self._job(run_id) is not None:
            return await self._call(_STOP_JOB, {"requestId": f"agui_stop_{run_id}", "jobId": run_id})
        raise RunNotFound(
            "This thread has no open run with this runId. The run may have ended, or belong to another thread."
        )

    async def _cancel(self, run_id: str) -> Json:
        return await self._call("CancelRun", {"requestId": f"agui_cancel_{run_id}", "runId": run_id})

    def _first_events(self, plan: _Plan) -> Iterator[Json]:
        found = self._found
        started: Json = {"type": "RUN_STARTED", "threadId": found.thread_id, "runId": found.run_id}
        yield started | ({} if found.is_legacy else {"protocolVersion": "1.0"})
        if found.state not in (None, {}):
            yield {"type": "STATE_SNAPSHOT", "snapshot": found.state}
        if plan.run:
            named = {"runId": plan.run["runId"], "conversationId": plan.run["conversationId"]}
            yield {"type": "CUSTOM", "name": "pawl.run", "value": named}
        for notice in plan.notices:
            yield {"type": "CUSTOM", "name": "pawl.notice", "value": notice}

    def _success(self) -> Json:
        found = self._found
        finished: Json = {"type": "RUN_FINISHED", "threadId": found.thread_id, "runId": found.run_id}
        return finished if found.is_legacy else finished | {"outcome": {"type": "success"}}

    async def _end(self, plan: _Plan, fold: Fold) -> Json | None:
        """Return this AG-UI run's final event if `fold` has reached the end of the run. Otherwise, return None."""
        state, last_seq = fold.run.get("state"), int(plan.run.get("lastSeq", "0"))
        if fold.seq < last_seq or state not in agui.ENDED | {"RUN_STATE_WAITING"}:
            return None
        if state in agui.ENDED and plan.is_reload and fold.seq == last_seq:
            return await self._with_jobs(plan, self._success())
        run = fold.run if state in agui.ENDED else await self._run(fold.run["runId"])
        if int(run["lastSeq"]) > fold.seq:
            return None
        end = agui_input.outcome(self._found, run, plan.done)
        is_asking = end is not None and end.get("outcome", {}).get("type") == "interrupt"
        if end is not None and (is_asking or state == "RUN_STATE_COMPLETED"):
            return await self._with_jobs(plan, end)
        return end

    async def _with_jobs(self, plan: _Plan, end: Json) -> Json:
        jobs = await self._jobs()
        asked = [each for job in jobs for each in agui_input.interrupts(job) if each["id"] not in plan.done]
        if not asked:
            return end
        own = end.get("outcome", {}).get("interrupts", [])
        return end | {"outcome": {"type": "interrupt", "interrupts": [*own, *asked]}}

    async def _success_with_jobs(self, plan: _Plan) -> list[Json]:
        success = await self._with_jobs(plan, self._success())
        return [*await self._activities(), success]

    async def _answer(self, run: Json | None, given: list[Json], message: Json | None) -> _Plan:
        found, plan = self._found, _Plan(run) if run else await self._reload(None)
        if found.resume:
            names, jobs = [each.interrupt_id for each in found.resume], await self._jobs()
            runs = [plan.run, *jobs] if plan.run else jobs
            calls = await self._known(runs, [name.partition(".")[0] for name in names])
            answers = agui_input.answers(found.resume, run or {}, jobs, calls)
            plan.notices += [{"interruptId": name, "message": agui_input.settled(name, calls)} for name in answers.late]
            if answers.decisions:
                asked = {"requestId": found.id_of("decide", answers.decisions), "decisions": answers.decisions}
                self._record_receipts(plan, (await self._call("DecideCalls", asked))["receipts"], given)
            for run_id, tokens in answers.tokens.items():
                topped = {"requestId": found.id_of(f"tokens {run_id}", names), "runId": run_id, "tokens": str(tokens)}
                await self._call("TopUpRun", topped)
            for run_id in answers.stops:
                await self._try_cancel(run_id)
        if run and given:
            asked = {"requestId": found.id_of("results", given), "runId": run["runId"], "results": given}
            self._record_receipts(plan, (await self._call("SubmitToolResults", asked))["receipts"], [])
        if message is not None:
            plan.run, plan.is_new = await self._send_message(run, message)
            plan.is_reload = False
        return plan

    async def _send_message(self, run: Json | None, message: Json) -> tuple[Json, bool]:
        found = self._found
        if run is None:
            return await self._start(message), True
        steering = {"requestId": found.id_of("steer", message), "conversationId": run["conversationId"]}
        steering |= {"text": agui_input.text_of(message), "policy": "MESSAGE_POLICY_STEER"}
        steering |= {"labels": agui_input.labels(found, message)}
        followed = (await self._call("SendMessage", steering))["run"]
        return (run if followed["runId"] == run["runId"] else await self._run(followed["runId"])), False

    def _record_receipts(self, plan: _Plan, receipts: list[Json], more: list[Json]) -> None:
        refused = [each for each in receipts if each["status"] not in _TAKEN]
        hard = [each for each in refused if each["status"] == "RECEIPT_STATUS_REFUSED"]
        if hard and len(hard) == len(receipts) and not more:
            reason = hard[0].get("reason", "")
            raise by_reason.get(reason, InvalidArguments).restore(hard[0].get("message", ""), reason, {})
        plan.notices += [{"callId": each["callId"], "message": each.get("message", "")} for each in refused]
        taken = {each["callId"] for each in receipts if each["status"] in _TAKEN}
        plan.done |= taken
        plan.done |= {
            each.interrupt_id for each in self._found.resume or () if each.interrupt_id.partition(".")[0] in taken
        }

    async def _reload(self, run: Json | None) -> _Plan:
        if run is None and self._conversation_id:
            asked = {"conversationId": self._conversation_id, "order": "RUN_ORDER_NEWEST_FIRST", "pageSize": 20}
            ended = (await self._call("ListRuns", asked)).get("runs", ())
            run = next((each for each in ended if not each.get("parentRunId")), None)
        return _Plan(run or {}, is_reload=True)

    async def _fold(self, plan: _Plan) -> Fold:
        found = self._found
        results = {call_id: message["id"] for call_id, message in found.results.items()}
        run_id, names = plan.run["runId"], found.user_ids
        if plan.is_new and (message := found.message) is not None:
            names, before = {agui_input.text_of(message): [message["id"]]}, found.messages[:-1]
        else:
            before = await self._before(run_id, names, results)
        return Fold(run_id, legacy=found.is_legacy, before=before, client_ids=names, results=results)

    async def _is_known(self, message: Json) -> bool:
        """Return whether Pawl already has the message, because the client received it from Pawl."""
        if not (self._conversation_id and message["id"].startswith(_MESSAGE)):
            return False
        known = await self._pages("ListMessages", {"conversationId": self._conversation_id}, "messages")
        return any(each["messageId"] == message["id"] for each in known)

    async def _before(self, run_id: str, names: Names, results: dict[str, str]) -> list[Json]:
        messages = await self._pages("ListMessages", {"conversationId": self._conversation_id}, "messages")
        of_run = [index for index, each in enumerate(messages) if each.get("runId") == run_id]
        messages = messages[: of_run[0]] if of_run else messages
        of_calls = dict.fromkeys(each["runId"] for each in messages if each.get("callIds") and each.get("runId"))
        calls = await self._calls(of_calls)
        given = [each for each in self._found.messages if each.get("role") in {"system", "developer"}]
        return [*given, *agui.with_calls(messages, calls, names, results)]

    async def _runs(self) -> list[Json]:
        """Return the thread's open runs that users started. The active run comes first."""
        asked = PUBLIC[_GET_CONVERSATION].read({"conversationKey": self._found.thread_id})
        try:
            answer = await self._services.call(
                _GET_CONVERSATION, asked, self._metadata, timeout_seconds=_DEADLINE_SECONDS
            )
        except ConversationNotFound:
            return []
        self._conversation_id = answer.conversation.conversation_id
        wanted = {"conversationId": self._conversation_id, "order": "RUN_ORDER_OLDEST_FIRST", "pageSize": 100}
        open_ = [*_OPEN, "RUN_STATE_NEEDS_ATTENTION"]
        runs = (await self._call("ListRuns", wanted | {"states": open_})).get("runs", ())
        return [run for run in runs if not run.get("parentRunId") and not run.get("job")]

    async def _run(self, run_id: str) -> Json:
        run: Json = (await self._call("GetRun", {"runId": run_id}))["run"]
        return run

    async def _jobs(self) -> list[Json]:
        asked = {"conversationId": self._conversation_id, "openOnly": True}
        self._open_jobs = await self._pages(_LIST_JOBS, asked, "jobs") if self._conversation_id else []
        return [await self._run(job["jobId"]) for job in self._open_jobs if job.get("state") == "RUN_STATE_WAITING"]

    async def _job(self, job_id: str) -> Json | None:
        """Return a job of the thread, or None if the thread has no such job."""
        try:
            job: Json = (await self._call(_GET_JOB, {"jobId": job_id}))["job"]
        except RunNotFound:
            return None
        return job if job["conversationId"] == self._conversation_id else None

    async def _activities(self) -> list[Json]:
        """Return the activities of the thread's open jobs, and of other jobs that the client still shows."""
        is_open = {job["jobId"] for job in self._open_jobs}
        shown = [each["id"] for each in self._found.messages if each.get("activityType") == agui.JOB_ACTIVITY]
        ended = [await self._job(job_id) for job_id in shown[-_ENDED_JOBS_MAX:] if job_id not in is_open]
        return [agui.job_activity(job) for job in (*self._open_jobs, *ended) if job is not None]

    async def _known(self, runs: Iterable[Json], call_ids: Collection[str]) -> dict[str, Json]:
        """Return the calls of runs and their child runs.

        If `call_ids` contains other calls, add the calls of recent jobs.
        """
        calls = await self._calls([run_id for run in runs for run_id in (run["runId"], *run.get("childRunIds", ()))])
        if self._conversation_id and not set(call_ids) <= calls.keys() | {"budget"}:
            newest = (await self._call(_LIST_JOBS, {"conversationId": self._conversation_id})).get("jobs", ())
            calls |= await self._calls([job["jobId"] for job in newest])
        return calls

    async def _calls(self, run_ids: Iterable[str]) -> dict[str, Json]:
        calls: dict[str, Json] = {}
        for run_id in run_ids:
            for call in await self._pages("ListCalls", {"runId": run_id}, "calls"):
                calls[call["callId"]] = call
        return calls

    async def _pages(self, method: str, asked: Json, name: str) -> list[Json]:
        found: list[Json] = []
        token = ""
        for _ in range(_PAGES_MAX):
            page = await self._call(method, asked | {"pageToken": token})
            found += page.get(name, ())
            if not (token := page.get("nextPageToken", "")):
                break
        return found

    async def _call(self, method: str, asked: Json) -> Json:
        found = PUBLIC[method if "/" in method else f"{_AGENT}/{method}"]
        answer: Any = await self._services.call(
            found.name, found.read(asked), self._metadata, timeout_seconds=_DEADLINE_SECONDS
        )
        return write(answer)


def _folded(fold: Fold, response: Json) -> Iterator[Json]:
    if "gap" in response:
        yield from fold.gap(response["gap"])
    for event in response.get("events", ()):
        yield from fold.fold(event)
