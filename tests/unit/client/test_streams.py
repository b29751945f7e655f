"""Streams that are followed, and the text that comes of them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any, Self

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.client import NoAnswer, streams
from pawl.client.streams import SILENCE_SECONDS_MAX
from pawl.client.text import TextReader
from pawl.errors import SlowConsumer
from pawl.event.v1 import event_pb2, gap_pb2, message_pb2

EOF = grpc.aio.EOF


class Time:
    """The time of an event loop, which passes when somebody waits."""

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
        assert self.now < 1000, "nobody is waited for so long"


class Stream:
    """A stream that brings responses, raises the errors among them, and is silent then."""

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
    """What is given of streams that follow each other, the last one again and again."""
    following = chain(each, repeat(each[-1]))
    seen = []
    begin = partial(Stream, time)
    async for response in streams.responses(lambda: begin(next(following)), ends=True, retry_seconds=retry_seconds):
        seen.append(response)
        time.now += reads_for_seconds
    return seen


async def test_a_server_that_is_silent_is_given_up(time: Time) -> None:
    with pytest.raises(NoAnswer, match="silent for 45 s"):
        await read(time, ())
    assert time.now < 50


async def test_an_unavailable_server_is_asked_again_for_the_time_that_the_client_says(time: Time) -> None:
    for retry_seconds in (0, 30, 120):
        time.now = 0.0
        with pytest.raises(NoAnswer, match="away"):
            await read(time, (1,), (NoAnswer("away"),), retry_seconds=retry_seconds)
        assert retry_seconds <= time.now - SILENCE_SECONDS_MAX < retry_seconds + 2
    time.now = 0.0
    away = [(NoAnswer("away"),)] * 1000
    assert await read(time, (1,), *away, (2, EOF), retry_seconds=math.inf) == [1, 2]


async def test_a_stream_that_falls_silent_is_begun_anew_before_that(time: Time) -> None:
    assert await read(time, (1,), (2,), (3, EOF)) == [1, 2, 3]
    with pytest.raises(NoAnswer, match="silent"):
        await read(time, (1,), ())


async def test_who_reads_more_slowly_than_a_server_is_waited_for_goes_on(time: Time) -> None:
    assert await read(time, (1, SlowConsumer()), (2, EOF), reads_for_seconds=60) == [1, 2]


WORDS = st.text("ab \n", max_size=4)


class Model:
    """A run whose model writes, fails, is taken over and summarises, as its log tells it."""

    def __init__(self) -> None:
        self.events: list[event_pb2.RunEvent | gap_pb2.Gap] = []
        self.answers: list[str] = []
        self.open = ""
        self._epoch = self._round = self._model_attempt = 1

    def tell(self, **fields: Any) -> None:
        self.events.append(event_pb2.RunEvent(attempt=self._epoch, seq=len(self.events) + 1, **fields))

    def begin(self, *, summary: bool = False) -> None:
        started = event_pb2.RoundStarted(round=self._round, model_attempt=self._model_attempt, summary=summary)
        self.tell(round_started=started)
        self.open = ""

    def write(self, text: str, *, refusal: bool = False) -> None:
        kind = "refusal" if refusal else "text"
        delta = event_pb2.OutputDelta(round=self._round, model_attempt=self._model_attempt, **{kind: text})  # type: ignore[arg-type]
        self.tell(output_delta=delta)
        self.open += text

    def fail(self) -> None:
        self.tell(round_retrying=event_pb2.RoundRetrying(round=self._round))
        self._model_attempt += 1
        self.open = ""

    def take_over(self) -> None:
        self._epoch += 1
        self.tell(warning=event_pb2.Warning())
        self.open = ""

    def resume(self, text: str) -> None:
        """Write by another worker, of whom nothing was heard before."""
        self._epoch += 1
        self.open = ""
        self.write(text)

    def retry(self, text: str) -> None:
        """Write in another attempt, without a word about the one before."""
        self._model_attempt += 1
        self.open = ""
        self.write(text)

    def add(self, role: message_pb2.Role.ValueType, text: str) -> None:
        self.tell(message_added=event_pb2.MessageAdded(message=message_pb2.Message(role=role, text=text)))
        if role == message_pb2.ROLE_ASSISTANT:
            self.answers += [text] if text else []
            self.open = ""
            self._round, self._model_attempt = self._round + 1, 1

    def lose(self) -> None:
        gap = gap_pb2.Gap()
        for text in self.answers:
            gap.snapshot.messages.add(role=message_pb2.ROLE_ASSISTANT, text=text)
        self.events.append(gap)
        self.open = ""

    def whole(self) -> str:
        return "\n\n".join([*self.answers, *([self.open] if self.open else [])])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "fail", "take_over", "lose"])),
        st.tuples(st.sampled_from(["write", "resume", "retry"]), WORDS),
        st.tuples(st.just("refuse"), WORDS),
        st.tuples(st.just("user"), WORDS),
        st.tuples(st.just("answer"), st.none() | WORDS),
        st.tuples(st.just("summarise"), WORDS),
    ),
    max_size=30,
)


def play(model: Model, step: Any) -> None:
    match step:
        case ("write" | "resume" | "retry" as name, text):
            getattr(model, name)(text)
        case ("refuse", text):
            model.write(text, refusal=True)
        case ("user", text):
            model.add(message_pb2.ROLE_USER, text)
        case ("answer", None):
            model.add(message_pb2.ROLE_ASSISTANT, model.open)
        case ("answer", text):
            model.add(message_pb2.ROLE_ASSISTANT, text)
        case ("summarise", text):
            model.begin(summary=True)
            model.write(text)
            model.open = ""
            model.add(message_pb2.ROLE_SUMMARY, text)
            model.begin()
        case (name,):
            getattr(model, name)()


@given(STEPS)
def test_the_pieces_are_the_answers_whatever_fails_and_whoever_takes_over(steps: list[Any]) -> None:
    """EVT-1."""
    model, reader, shown = Model(), TextReader(), ""
    for step in steps:
        play(model, step)
        for event in model.events:
            piece = reader.take(event)
            if piece is not None:
                assert piece.seq == (event.to_seq if isinstance(event, gap_pb2.Gap) else event.seq)
                assert 0 <= piece.takes_back <= len(shown)
                assert piece or piece.takes_back
                shown = shown[: len(shown) - piece.takes_back] + piece
        model.events.clear()
        assert shown == model.whole()
