"""Tables of cases that are one test, since each case is a moment and each test costs its collection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def for_each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test for each row, as `pytest.mark.parametrize` does, but as one test; a failure names its row."""
    keys = [names] if isinstance(names, str) else list(names)
    table = [dict(zip(keys, [row] if isinstance(names, str) else row, strict=True)) for row in rows]

    def decorate(test: Callable[..., Any]) -> Any:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for row in table:
                try:
                    test(**fixtures, **row)
                except BaseException as error:
                    error.add_note(f"in the row {row!r:.300}")
                    raise

        @wraps(test)
        async def run_async(**fixtures: Any) -> None:
            for row in table:
                try:
                    await test(**fixtures, **row)
                except BaseException as error:
                    error.add_note(f"in the row {row!r:.300}")
                    raise

        found: Any = run_async if inspect.iscoroutinefunction(test) else run
        taken = inspect.signature(test)
        found.__signature__ = taken.replace(
            parameters=[each for name, each in taken.parameters.items() if name not in keys]
        )
        return found

    return decorate
