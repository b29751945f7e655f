"""Streams that are followed: begun anew when they are lost, given up when nobody answers."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any, Self

import grpc
import pytest

from pawl.client import NoAnswer, streams
from pawl.errors import SlowConsumer

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


async def given(time: Time, *each: tuple[Any, ...], reads_for_seconds: float = 0.0) -> list[Any]:
    """What is given of streams that follow each other, the last one again and again."""
    following = chain(each, repeat(each[-1]))
    seen = []
    async for response in streams.responses(lambda: Stream(time, next(following)), ends=True):
        seen.append(response)
        time.now += reads_for_seconds
    return seen


async def test_a_server_that_is_silent_is_given_up(time: Time) -> None:
    with pytest.raises(NoAnswer, match="silent for 45 s"):
        await given(time, ())
    assert time.now < 50


async def test_a_server_that_is_away_is_given_up(time: Time) -> None:
    with pytest.raises(NoAnswer, match="away"):
        await given(time, (1,), (NoAnswer("away"),))
    assert 75 < time.now < 80


async def test_a_stream_that_falls_silent_is_begun_anew_before_that(time: Time) -> None:
    assert await given(time, (1,), (2,), (3, EOF)) == [1, 2, 3]
    with pytest.raises(NoAnswer, match="silent"):
        await given(time, (1,), ())


async def test_a_replica_that_falls_silent_and_goes_away_is_waited_for(time: Time) -> None:
    assert await given(time, (1,), (NoAnswer(),), (2, EOF)) == [1, 2]


async def test_who_reads_more_slowly_than_a_server_is_waited_for_goes_on(time: Time) -> None:
    assert await given(time, (1, SlowConsumer()), (2, EOF), reads_for_seconds=60) == [1, 2]
