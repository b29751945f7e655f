"""Names are looked up at the same time, and one whose names are never answered holds up nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvloop

from pawl.chassis.lookups import Lookups
from pawl.chassis.tasks import shield


class HangingNames:
    """A resolver that answers no name that begins with `hang` before it is told to."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.asked: Counter[str] = Counter()

    async def __call__(self, host: str, _: int) -> Sequence[str]:
        self.asked[host] += 1
        if host.startswith("hang"):
            await self.answered.wait()
        return ["127.0.0.1"]


async def looked_up(lookups: Lookups, store: str, host: str) -> Sequence[str]:
    return await shield(await lookups.begin(store, host, 80))


async def test_a_store_whose_names_hang_leaves_half_to_the_others() -> None:
    names = HangingNames()
    lookups = Lookups(names, at_once_max=8)
    stores = {"acme": "hang.acme", "other": "hang.other", "third": "hang.third"}
    waiting = [asyncio.create_task(looked_up(lookups, *each)) for each in stores.items() for _ in range(20)]
    assert await asyncio.wait_for(looked_up(lookups, "fourth", "fine"), 60) == ["127.0.0.1"]
    assert names.asked == {"hang.acme": 4, "hang.other": 2, "hang.third": 1, "fine": 1}
    for each in waiting[1:]:
        each.cancel()
    names.answered.set()
    assert await asyncio.wait_for(waiting[0], 60) == ["127.0.0.1"]
    assert await asyncio.wait_for(looked_up(lookups, "acme", "fine"), 60) == ["127.0.0.1"]
    assert names.asked.total() == 9, "who gave up before its turn takes no place"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_system_is_asked_for_many_names_at_once(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own, uvloop asks for two."""
    together = threading.Barrier(10)

    def getaddrinfo(host: bytes, port: int, **_: Any) -> list[Any]:
        assert threading.current_thread().daemon, "one that hangs keeps no process alive"
        if host != b"none.test":
            together.wait(timeout=60)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        raise socket.gaierror("no such name")

    async def look_up() -> None:
        lookups = Lookups()
        found = await asyncio.gather(*(looked_up(lookups, "acme", f"{number}.test") for number in range(10)))
        assert found == [["127.0.0.1"]] * 10
        with pytest.raises(OSError, match="no such name"):
            await looked_up(lookups, "acme", "none.test")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(look_up())
