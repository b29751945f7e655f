"""Invalid arguments of the client, and the client without asyncio."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import pytest

from pawl.agent.v1 import usage_pb2
from pawl.client import AsyncClient, AsyncSession, Client, SyncSession, answer, approve, edit, image, reject, result
from pawl.client.blocking import LoopThread
from pawl.client.forms import parts_of
from pawl.client.history import history
from pawl.errors import InvalidField, InvalidHistory
from pawl.event.v1 import message_pb2
from tests.tables import not_refused

UNREACHABLE = "127.0.0.1:1"
ANY: Any = "call_1"
ANY_PERIOD: Any = "week"


async def test_invalid_arguments_are_refused_and_name_the_field() -> None:
    rows: list[tuple[Callable[[Any], Any], str]] = [
        (lambda pawl: pawl.decide(ANY), "decision"),
        (lambda pawl: pawl.decide_all([ANY]), "decision"),
        (lambda pawl: pawl.submit(ANY), "result"),
        (lambda pawl: pawl.fork("conv_1", -1), "number"),
        (lambda pawl: pawl.fork("conv_1", 2**64), "number"),
        (lambda pawl: pawl.top_up("run_1", -5), "tokens"),
        (lambda pawl: pawl.start(parts=[5]), "parts"),
        (lambda pawl: pawl.send("conv_1", parts=[None]), "parts"),
        (lambda pawl: pawl.start_job("clock", until={}), "until"),
        (lambda pawl: pawl.start_job("clock", until=""), "until"),
        (lambda pawl: pawl.start_job("clock", when=""), "when"),
        (lambda pawl: pawl.start_job("clock", when={}), "when"),
        (lambda pawl: pawl.start_job("clock", when={"pause": 60}), "when"),
    ]
    async with AsyncClient(UNREACHABLE, environment={}) as pawl:
        for call, field in rows:
            with pytest.raises(InvalidField) as refused:
                await call(pawl)
            assert refused.value.metadata == {"field": field}
    with Client(UNREACHABLE, environment={}) as plain:
        assert not_refused(InvalidField, lambda call: call(plain), [call for call, _ in rows]) == []


def test_usage_dimensions_and_periods_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    async def pages(_client: AsyncClient, _method: object, request: object) -> AsyncGenerator[Any, None]:
        sent.append(request)
        yield usage_pb2.GetUsageResponse(rows=[usage_pb2.UsageRow(model="m")])

    monkeypatch.setattr(AsyncClient, "pages", pages)
    with Client(UNREACHABLE, environment={}) as pawl:
        assert [row.model for row in pawl.usage(by=["model"], per="day", start=datetime(2026, 1, 1, tzinfo=UTC))] == [
            "m"
        ]
        with pytest.raises(InvalidField, match="per must be one of hour, day, got 'week'"):
            list(pawl.usage(per=ANY_PERIOD))
    (request,) = sent
    assert (request.by, request.period) == ([usage_pb2.USAGE_DIMENSION_MODEL], usage_pb2.USAGE_PERIOD_DAY)
    assert request.from_time.ToDatetime(UTC) == datetime(2026, 1, 1, tzinfo=UTC)


async def test_invalid_calls_and_positions_are_refused() -> None:
    makers: list[Callable[[Any], Any]] = [approve, reject]
    makers += [lambda call: edit(call, {}), lambda call: answer(call, "Oslo"), lambda call: result(call, 1)]
    assert not_refused(InvalidField, lambda make: make(ANY), makers) == []
    async with AsyncClient(UNREACHABLE, environment={}) as pawl:
        with pytest.raises(InvalidField, match="after_seq"):
            await anext(pawl.watch("run_1", -1))


def test_a_string_among_parts_is_a_text_part() -> None:
    text, picture = message_pb2.Part(text="Look"), image(b"x")
    assert parts_of(["Look", picture]) == [text, picture]
    assert parts_of("Look") == [text]


def test_an_invalid_message_list_is_refused() -> None:
    rows: list[Any] = [{"messages": [{"role": "user", "content": "Ahoy"}]}, "[]", b"[]"]
    assert not_refused(InvalidHistory, history, rows) == []


async def nothing() -> None: ...


def waits_in_run(ident: int) -> bool:
    """Return whether a thread waits in `LoopThread.run`."""
    frame: FrameType | None = sys._current_frames()[ident]
    names = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[:3] == ["Condition.wait", "Future.result", "LoopThread.run"]


def test_an_interrupted_call_is_cancelled() -> None:
    thread, cancelled = LoopThread(), threading.Event()
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt() -> None:
        while not waits_in_run(main):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    # A command that a shell runs in its background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(endless)
    finally:
        signal.signal(signal.SIGINT, before)
    assert cancelled.wait(60)
    interrupting.join()
    thread.close(nothing)


def test_the_client_thread_refuses_to_wait_for_itself() -> None:
    """Otherwise an async tool that called the blocking client would deadlock."""
    thread = LoopThread()

    async def wait_for_itself() -> None:
        thread.run(nothing)

    with pytest.raises(RuntimeError, match="cannot call the blocking client"):
        thread.run(wait_for_itself)
    thread.close(nothing)


@pytest.mark.parametrize(("blocking", "original"), [(Client, AsyncClient), (SyncSession, AsyncSession)])
def test_the_synchronous_client_has_every_method(blocking: type, original: type) -> None:
    own = {name for name, value in vars(original).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert {name for name in own if not hasattr(blocking, name)} == set()
    assert {name for name in own if not getattr(blocking, name).__doc__} == set()
