"""Streams that a client follows, and the text that it shows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any, Self

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, jobs_pb2
from pawl.client import AsyncClient, Client, NoAnswer, streams
from pawl.client.streams import SILENCE_SECONDS_MAX
from pawl.client.text import TextReader
from pawl.errors import SlowConsumer
from pawl.event.v1 import event_pb2, gap_pb2, message_pb2, run_pb2

EOF = grpc.aio.EOF


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.patience_seconds = 0.0

    def get_running_loop(self) -> Self:
        return self

    def time(self) -> float:
        return self.now

    def timeout(self, seconds: float) -> nullcontext[None]:
        self.patience_seconds = seconds
        return nullcontext()

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "no caller waits that long"


class Stream:
    """A stream that yields the responses, raises the errors among them, and then stays silent."""

    def __init__(self, time: Time, responses: tuple[Any, ...]) -> None:
        self._time = time
        self._responses = iter(responses)

    async def read(self) -> Any:
        response = next(self._responses, None)
        if response is None:
            self._time.now += self._time.patience_seconds
            raise TimeoutError
        if isinstance(response, Exception):
            raise response
        return response

    def cancel(self) -> None: ...


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(streams, "asyncio", time)
    return time


async def read(
    time: Time, *each: tuple[Any, ...], reads_for_seconds: float = 0.0, retry_seconds: float = 30.0
) -> list[Any]:
    """Return the responses from successive streams. The last stream is opened again and again."""
    following = chain(each, repeat(each[-1]))
    seen = []
    new_stream = partial(Stream, time)
    async for response in streams.responses(
        lambda: new_stream(next(following)), ends=True, retry_seconds=retry_seconds
    ):
        seen.append(response)
        time.now += reads_for_seconds
    return seen


async def test_a_silent_server_raises_a_no_answer_error(time: Time) -> None:
    with pytest.raises(NoAnswer, match="silent for 45 s"):
        await read(time, ())
    assert time.now < 50


async def test_an_unavailable_server_is_retried_for_the_configured_time(time: Time) -> None:
    for retry_seconds in (0, 30, 120):
        time.now = 0.0
        with pytest.raises(NoAnswer, match="away"):
            await read(time, (1,), (NoAnswer("away"),), retry_seconds=retry_seconds)
        assert retry_seconds <= time.now - SILENCE_SECONDS_MAX < retry_seconds + 2
    time.now = 0.0
    assert await read(time, (1,), *([(NoAnswer("away"),)] * 1000), (2, EOF), retry_seconds=math.inf) == [1, 2]


async def test_a_silent_stream_is_reopened_before_the_timeout(time: Time) -> None:
    assert await read(time, (1,), (2,), (3, EOF)) == [1, 2, 3]
    with pytest.raises(NoAnswer, match="silent"):
        await read(time, (1,), ())


async def test_a_slow_consumer_resumes(time: Time) -> None:
    assert await read(time, (1, SlowConsumer()), (2, EOF), reads_for_seconds=60) == [1, 2]


def delta(text: str, *, attempt: int = 1, number: int = 1, model_attempt: int = 1) -> event_pb2.RunEvent:
    written = event_pb2.OutputDelta(round=number, model_attempt=model_attempt, text=text)
    return event_pb2.RunEvent(attempt=attempt, output_delta=written)


def added(role: message_pb2.Role.ValueType, text: str) -> event_pb2.RunEvent:
    message = message_pb2.Message(role=role, text=text)
    return event_pb2.RunEvent(attempt=2, message_added=event_pb2.MessageAdded(message=message))


def test_streamed_pieces_form_the_answer_despite_failures_and_takeovers() -> None:
    """EVT-1: each row has an event and the text that a client shows after that event."""
    retrying = event_pb2.RunEvent(attempt=1, round_retrying=event_pb2.RoundRetrying(round=1))
    summary = event_pb2.RunEvent(attempt=2, round_started=event_pb2.RoundStarted(round=2, summary=True))
    answering = event_pb2.RunEvent(attempt=2, round_started=event_pb2.RoundStarted(round=2))
    gap = gap_pb2.Gap(to_seq=9)
    gap.snapshot.messages.add(role=message_pb2.ROLE_ASSISTANT, text="One, again.")
    rows: list[tuple[event_pb2.RunEvent | gap_pb2.Gap, str]] = [
        (delta("On"), "On"),
        (delta("e"), "One"),
        (retrying, ""),
        (delta("Or", model_attempt=2), "Or"),
        (delta("Once", model_attempt=3), "Once"),
        (delta("One", attempt=2, model_attempt=3), "One"),
        (added(message_pb2.ROLE_USER, "and?"), "One"),
        (added(message_pb2.ROLE_ASSISTANT, "One."), "One."),
        (summary, "One."),
        (delta("short", attempt=2, number=2), "One."),
        (added(message_pb2.ROLE_SUMMARY, "short"), "One."),
        (answering, "One."),
        (delta("", attempt=2, number=2), "One."),
        (delta("Two", attempt=2, number=2), "One.\n\nTwo"),
        (gap, "One, again."),
    ]
    reader, shown = TextReader(), ""
    for event, text in rows:
        piece = reader.take(event)
        if piece is not None:
            assert piece.seq == (9 if event is gap else 0)
            shown = shown[: len(shown) - piece.takes_back] + piece
        assert shown == text, event


# Jobs as the clients return them.


JOB = jobs_pb2.BackgroundJob(job_id="run_1", definition=run_pb2.Job(tool_name="scrape"))


class Service:
    """Answers every method about the job, and keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Any) -> Any:
            self.asked.append(request)
            if method == "GetRun":
                return agent_pb2.GetRunResponse(run=run_pb2.Run(state=run_pb2.RUN_STATE_COMPLETED, output_text="done"))
            made = getattr(jobs_pb2, f"{method}Response")
            return made(jobs=[JOB]) if method == "ListJobs" else made(job=JOB)

        return answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    for name in ("jobs", "agents"):
        monkeypatch.setattr(AsyncClient, name, service)
    return service


async def test_a_job_is_read_and_controlled_with_its_own_methods(service: Service) -> None:
    async with AsyncClient("127.0.0.1:1", environment={}) as pawl:
        jobs = [await pawl.start_job("scrape"), await pawl.get_job("run_1"), *[job async for job in pawl.list_jobs()]]
        service.asked.clear()
        for job in jobs:
            assert (job.job_id, job.definition.tool_name) == ("run_1", "scrape")
            assert [await job.pause(), await job.resume(), await job.stop("enough")] == [JOB] * 3
    assert [(request.job_id, getattr(request, "reason", "")) for request in service.asked] == [
        *[("run_1", ""), ("run_1", ""), ("run_1", "enough")] * 3
    ]


def test_methods_of_a_job_block_if_it_comes_from_the_blocking_client(service: Service) -> None:
    with Client("127.0.0.1:1", environment={}) as pawl:
        jobs = [pawl.start_job("scrape"), pawl.get_job("run_1"), *pawl.list_jobs()]
        assert ([job.stop() for job in jobs], jobs[0].result().output_text) == ([JOB] * 3, "done")
