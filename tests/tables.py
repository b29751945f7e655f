"""Tables of cases in one test, and the table of the error reasons that each method may return.

Collecting a test costs more than running a case. The reasons of a method are those in its comment and those common
to all methods.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final, TypeVar

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


PROTO: Final = Path(__file__).parents[1] / "proto"

_REASON: Final = re.compile(
    r"\b[A-Z]+(?:_[A-Z]+)+\b|\b(?:OVERLOADED|UNAUTHENTICATED|CANCELLED|INTERNAL|UNREADABLE|CONFLICT)\b"
)
_VALUE: Final = re.compile(r"^  ERROR_REASON_([A-Z_]+) = ", re.MULTILINE)
_METHOD: Final = re.compile(r"((?:  //[^\n]*\n)+)  rpc (\w+)\(")
_SERVICE: Final = re.compile(r"^service (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_MESSAGE: Final = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_REQUEST: Final = re.compile(r"  rpc (\w+)\((?:stream )?(\w+)\)")
_AS: Final = re.compile(r"\bas (\w+)")
_COMMON: Final = re.compile(r"// Every method may return(.*?)\npackage", re.DOTALL)


@cache
def reasons() -> frozenset[str]:
    return frozenset(_VALUE.findall((PROTO / "pawl/error/v1/error.proto").read_text())) - {"UNSPECIFIED"}


@cache
def common() -> frozenset[str]:
    found = _COMMON.search((PROTO / "pawl/error/v1/error.proto").read_text())
    # Only for a key of the wrong kind. If a role is missing, the method's comment names the error.
    return frozenset(_REASON.findall(found[1]) if found else ()) & reasons() - {"PERMISSION_DENIED"}


@cache
def errors() -> Mapping[str, str]:
    """Return the `Errors:` section of each method's comment.

    Keys are method paths, such as `/pawl.agent.v1.AgentService/StartRun`.
    """
    said: dict[str, str] = {}
    for file in sorted(PROTO.glob("pawl/**/*.proto")):
        written = file.read_text()
        package = re.search(r"^package (.*);", written, re.MULTILINE)
        for service, body in _SERVICE.findall(written):
            for comment, method in _METHOD.findall(body):
                path = f"/{package[1] if package else ''}.{service}/{method}"
                said[path] = comment.partition("Errors:")[2].replace("  //", "").strip()
    return said


@cache
def requests() -> Mapping[str, str]:
    written = {path: path.read_text() for path in sorted(PROTO.glob("pawl/**/*.proto"))}
    messages = dict(_MESSAGE.findall("\n".join(written.values())))
    names = {name: request for text in written.values() for name, request in _REQUEST.findall(text)}
    return {path: messages.get(names[path.rpartition("/")[2]], "") for path in errors()}


@cache
def documented() -> Mapping[str, frozenset[str]]:
    said = errors()
    return {path: common() | _named(path, text) for path, text in said.items()}


def _named(path: str, text: str) -> frozenset[str]:
    others = (f"{path.rpartition('/')[0]}/{name}" for name in _AS.findall(text))
    inherited = [_named(other, errors()[other]) for other in others if other in errors()]
    return (frozenset(_REASON.findall(text)) & reasons()).union(*inherited)
