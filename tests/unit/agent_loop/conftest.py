"""Runs coroutine tests on a virtual clock, so that sleeps take no time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.manual_clock import VirtualLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], VirtualLoop]]:
    return {"virtual": VirtualLoop}
