"""Tables of cases in one test, because collecting a test costs more than running a case."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def for_each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test for each row, like `pytest.mark.parametrize` but as one test. A failure names its row."""
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


def not_refused(error: type[Exception], call: Callable[[T], Any], rows: Iterable[T]) -> list[T]:
    return [row for row in rows if refusal(error, lambda row=row: call(row)) is None]  # type: ignore[misc]


def not_explained(
    error: type[Exception], call: Callable[[T], Any], rows: Mapping[T, str] | Iterable[tuple[T, str]]
) -> list[tuple[T, str, str | None]]:
    """Return each row for which the call does not raise `error` with the expected message.

    Rows end with the actual message, or None if nothing was raised.
    """
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    results = [(row, says, refusal(error, lambda row=row: call(row))) for row, says in pairs]  # type: ignore[misc]
    return [(row, says, found) for row, says, found in results if found is None or not re.search(says, found)]


def refusal(error: type[Exception], call: Callable[[], Any]) -> str | None:
    try:
        call()
    except error as raised:
        return str(raised)
    return None
