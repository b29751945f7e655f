"""News of gRPC is heard together, and calls are taken in several at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from functools import partial
from typing import Any

from pawl.chassis.event_loop import Loop
from pawl.chassis.rpc_accept import _Line

# The word of grpc.aio is asked for in a process of its own: it is bound to the first loop of a process.
PROGRAM = """
import asyncio, grpc
from pawl.chassis import event_loop

found = []
real = event_loop._is_of_grpc
event_loop._is_of_grpc = lambda callback: found.append(real(callback)) or found[-1]

async def main():
    async with grpc.aio.insecure_channel("unix:/nowhere"):
        pass

with asyncio.Runner(loop_factory=event_loop.Loop) as runner:
    runner.run(main())
print(found)
"""


class News:
    def __init__(self, news: socket.socket) -> None:
        self.news = news
        self.heard = 0

    def _handle_events(self, loop: Any) -> None:
        """As gRPC's own: it reads a byte, and looks at all that has happened."""
        self.heard += 1
        try:
            self.news.recv(1)
        except BlockingIOError:
            return


def test_what_grpc_has_to_say_is_heard_at_once() -> None:
    news, thread = socket.socketpair()
    news.setblocking(False)
    handler = News(news)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(news, partial(handler._handle_events, loop))
        thread.send(b"1" * 100)
        async with asyncio.timeout(20):
            while not handler.heard:
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        loop.remove_reader(news)

    with news, thread, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert handler.heard == 1


def test_others_read_what_is_theirs() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    read: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(here, lambda: read.append(here.recv(1)))
        there.send(b"123")
        async with asyncio.timeout(20):
            while len(read) < 3:
                await asyncio.sleep(0)
        loop.remove_reader(here)

    with here, there, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert read == [b"1", b"2", b"3"]


def test_grpc_is_known_by_its_reader() -> None:
    """Should this fail with another version of grpc, look up where it reads its news."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[True]"


class Method:
    """The calls of a method, as gRPC gives them: those that were asked for first come first."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[str]] = []

    def ask(self) -> asyncio.Task[str]:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked.append(answer)

        async def wait() -> str:
            return await answer

        return asyncio.ensure_future(wait())


async def test_calls_are_asked_for_ahead_once_one_has_come_and_are_taken_in_their_order() -> None:
    method = Method()
    line = _Line(method.ask)
    first = line.next()
    assert len(method.asked) == 1
    method.asked[0].set_result("call 0")
    async with asyncio.timeout(20):
        assert await first == "call 0"
        following = line.next()
        assert len(method.asked) == 9
        for number, answer in enumerate(method.asked[1:], 1):
            answer.set_result(f"call {number}")
        taken = [await following]
        taken += [await line.next() for _ in range(7)]
    assert taken == [f"call {number}" for number in range(1, 9)]


async def test_a_call_that_is_there_is_not_waited_for() -> None:
    method = Method()
    line = _Line(method.ask)
    for _ in range(2):
        following = line.next()
        method.asked[-1].set_result("call")
        await asyncio.wait([following])
    for answer in method.asked:
        if not answer.done():
            answer.set_result("call")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    taken = 0
    while (following := line.next()).done():
        waiting = asyncio.wait([following])
        try:
            waiting.send(None)
        except StopIteration:
            taken += 1
        else:
            raise AssertionError("it waited")
    assert taken == 7


async def test_when_the_server_ends_what_was_asked_for_fails_and_nobody_complains() -> None:
    method = Method()
    line = _Line(method.ask)
    following = line.next()
    method.asked[0].set_result("call")
    async with asyncio.timeout(20):
        await following
        last = line.next()
        for answer in method.asked[1:]:
            answer.set_exception(RuntimeError("the server ends"))
        await asyncio.wait([last])
    assert isinstance(last.exception(), RuntimeError)
