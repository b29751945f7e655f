"""The error reasons that each method may return: those in its comment and those common to all methods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

PROTO: Final = Path(__file__).parents[1] / "proto"

_REASON: Final = re.compile(r"\b[A-Z]+(?:_[A-Z]+)+\b|\b(?:OVERLOADED|UNAUTHENTICATED|CANCELLED|INTERNAL|UNREADABLE)\b")
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
