"""The erasure log is replayed until applied, and again on each new connection (I22)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pawl.job_store.erasure.erasing import JetStreamErasures


class Bus:
    connected = True
    connection_number = 1

    def jetstream(self) -> Any:
        return self

    async def update_stream(self, _config: object) -> Any:
        return SimpleNamespace(state=SimpleNamespace(messages=0))


async def test_the_erasure_log_is_read_until_it_was_applied() -> None:
    bus = Bus()
    log = JetStreamErasures(bus)  # type: ignore[arg-type]  # only these methods are used
    assert [await log.open(), await log.open()] == [True, True]
    log.applied()
    assert await log.open() is None


async def test_the_erasure_log_is_read_again_on_a_new_connection() -> None:
    bus = Bus()
    log = JetStreamErasures(bus)  # type: ignore[arg-type]  # only these methods are used
    await log.open()
    bus.connection_number = 2
    log.applied()
    assert await log.open() is True
