"""The words for a person when something cannot be done: one sentence, and what to do next."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pawl.chassis.process.settings import split_address
from pawl.chassis.process.start import StartError
from pawl.cli import wording
from pawl.client import NoAnswer
from pawl.client.target import SERVICES, Asks
from pawl.errors import PawlError

_KEY: Final = "PAWL_API_KEY"
_NOT_TAKEN: Final = (
    f"It came from {_KEY}: set that to a key that `pawl keys create` made here, or to a token that is still good."
)

_NO_KEY: Final = "no key was sent"
_FOLDER: Final = ".pawl"

_NEXT: Final = {
    "UNAUTHENTICATED": (
        "Set PAWL_API_KEY to your key. That of a suite on this machine is found without, in the folder where"
        " `pawl up` runs or with --data FOLDER, for addresses as `pawl up` shows them while no other user listens"
        " there."
    ),
    "TOOL_NOT_FOUND": "`pawl tools` lists those that there are.",
    "SCHEDULE_NOT_FOUND": "`pawl schedules list` lists yours.",
    "TRIGGER_NOT_FOUND": "`pawl triggers list` lists yours.",
    "TOO_MANY_JOBS": "`pawl jobs list` shows them.",
    "AGENT_NOT_FOUND": "`pawl agents list` shows those that you may use.",
    "RUN_NOT_FOUND": "`pawl runs` lists yours.",
    "ATTENTION_NOT_NEEDED": "`pawl attention` lists the runs that need an operator.",
    "DOCUMENT_NOT_FOUND": "`pawl documents list` shows those that you can see; --shared means those of the store.",
    "SOURCE_NOT_FOUND": "`pawl sources list` shows those of the store.",
    "SOURCE_EXISTS": "Add `--replace` to put this one in its place.",
    "RULE_NOT_FOUND": "`pawl rules list` lists yours and those of the store.",
    "KEY_NOT_FOUND": "`pawl keys list` shows those that you govern.",
    "CONVERSATION_ERASED": "`pawl conversations erase` with its id says how far that is.",
    "FORK_POINT_OPEN": "`pawl conversations show CONV --numbers` shows the numbers.",
    "CONVERSATION_NOT_FOUND": (
        "`pawl conversations list` lists yours; one that another user shares can be read, and written to if it says so."
    ),
    "CONVERSATION_EXISTS": "`pawl conversations show --key` with it shows that one; go on there, or take another key.",
    "CHANNEL_NOT_FOUND": "`pawl notify list` shows yours.",
    "DELIVERY_NOT_FOUND": "`pawl notify list` shows your channels, `pawl notify deliveries ID` what each was sent.",
    "CALL_NOT_FOUND": "`pawl inbox` lists the calls that wait.",
    "CALL_NOT_PENDING": "`pawl inbox` lists the calls that wait.",
    "ALREADY_DECIDED": "`pawl inbox` lists the calls that wait.",
    "DEADLINE_PASSED": "`pawl inbox` lists the calls that wait.",
    "GRANT_NOT_OFFERED": "Approve the call alone, without --series.",
    "DIGEST_MISMATCH": "Look at the call again with `pawl inbox`.",
    "OVERLOADED": "Try again in a moment.",
    "SHUTTING_DOWN": "Try again in a moment.",
    "DEPENDENCY_UNAVAILABLE": "Try again in a moment.",
    "DEADLINE_EXCEEDED": "Try again in a moment.",
    "INTERNAL": "The log of the service has the details under that id.",
}

# The reasons whose advice says what lists the ids of a field.
_LISTED: Final = {"channel_id": "CHANNEL_NOT_FOUND", "delivery_ids": "DELIVERY_NOT_FOUND"}

# The parameters of commands by which fields are given that have another name there; the first that a command has.
_GIVEN_BY: Final[Mapping[str, Sequence[str]]] = {
    "arguments_json": ("edit",),
    "conversation_id": ("conversation",),
    "conversation_key": ("key",),
    "document": ("document_url",),
    "document_name": ("files", "shared_files"),
    "duration_minutes": ("duration",),
    "end_time": ("duration",),
    "expire_time": ("lasts",),
    "host": ("username",),
    "image": ("images",),
    "interval_seconds": ("interval",),
    "iterations_max": ("stop_after",),
    "labels": ("label",),
    "port": ("username",),
    "reasoning_effort": ("effort",),
    "report_iterations": ("reports",),
    "report_seconds": ("reports",),
    "schema_json": ("schema",),
    "time_zone": ("zone",),
    "total_tokens_max": ("tokens_max",),
}
_FIELD: Final = re.compile(r"(?<![\w.'\"/-])(`?)([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*)\1(?![\w'\"/-])")
# People are told in words what an id may be.
_ID_PATTERN: Final = "must match ^[A-Za-z0-9_-]{1,64}$"
_ID_WORDS: Final = "must have 1 to 64 letters, digits, _ and -, and nothing else"

# What gRPC says of a connection on which the two sides do not agree about TLS, and what to do.
_OF_TLS: Final = (
    ("WRONG_VERSION_NUMBER", "{} does not speak TLS. Leave out --ca and PAWL_TLS_CA_FILE."),
    ("certificate has expired", "The certificate at {} has expired. Whoever runs the suite renews it."),
    ("Hostname Verification", "The certificate at {} has not this name. Use a name that it has as the address."),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "The certificate at {} is of another authority than --ca or PAWL_TLS_CA_FILE gives. Give its own.",
    ),
)
_SPEAKS_TLS: Final = "{} speaks TLS. Give the certificate of its authority with --ca FILE or PAWL_TLS_CA_FILE."
# It closes a connection that does not begin as TLS does.
_CLOSED: Final = ("Socket closed", "reset by peer")
_TLS_SECONDS_MAX: Final = 2.0


class CommandError(Exception):
    """A command cannot be carried out; the message is for people and says what to do next.

    `parameter` is that of the command which is wrong: people are told what they typed for it.
    """

    def __init__(self, message: str, *, parameter: str = "") -> None:
        self.parameter = parameter
        super().__init__(message)


def explain(
    error: Exception, addresses: list[str], asks: Asks = "agent", typed: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return what to tell about an error of a call to `addresses` of a service.

    `typed` has what people type for the parameters of the command: `--every` for `interval_seconds`.
    """
    if isinstance(error, CommandError) and error.parameter:
        return f"{_option(error.parameter, typed) or error.parameter}: {error}"
    if isinstance(error, CommandError | StartError):
        return str(error)
    if isinstance(error, NoAnswer):
        return _about_tls(error.message, addresses) or _silent(addresses, asks)
    if isinstance(error, PawlError):
        return _sentence(error, typed)
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        # Half a surrogate pair stands for a byte that is none of a text.
        return "What was given is not a text in UTF-8. Convert it first."
    return f"This should not have happened: {type(error).__name__}: {error}"


def _silent(addresses: list[str], asks: Asks) -> str:
    where = ", ".join(addresses)
    if asks == "agent":
        return f"No Pawl suite answers at {where}. Start one with `pawl up`."
    log = f"logs/{SERVICES[asks]}.log in its data folder"
    return (
        f"{SERVICES[asks]} does not answer at {where}. If the suite runs, {log} says why;"
        " else start one with `pawl up`."
    )


def _about_tls(details: str, addresses: list[str]) -> str:
    """Return what to tell about a connection that failed because of TLS or the lack of it; empty if it did not."""
    where = ", ".join(addresses)
    for sign, told in _OF_TLS:
        if sign in details:
            return told.format(where)
    if any(sign in details for sign in _CLOSED) and any(map(_speaks_tls, addresses)):
        return _SPEAKS_TLS.format(where)
    return ""


def _speaks_tls(address: str) -> bool:
    """Greet whoever listens there, and believe nothing of what it says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(split_address(address), timeout=_TLS_SECONDS_MAX) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except (OSError, ValueError):
        return False


def _sentence(error: PawlError, typed: Mapping[str, str]) -> str:
    message = wording.sentence(_as_typed(error, typed))
    following = _NEXT.get(error.reason, "")
    if error.reason == "INVALID_ID":
        following = _NEXT.get(_LISTED.get(error.message.partition(" ")[0], ""), "")
    if error.reason == "RUN_NOT_FOUND" and _option("job_id", typed):
        following = "`pawl jobs list --all` lists your jobs."
    if error.reason == "UNAUTHENTICATED" and os.environ.get(_KEY):
        following = _NOT_TAKEN
    elif error.reason == "UNAUTHENTICATED" and message.lower().startswith(_NO_KEY) and not Path(_FOLDER).exists():
        message = f"There is no {_FOLDER} in {Path.cwd()}, so no key was found."
    first = message.partition(" ")[0]
    # The name of a field, of metadata or of a file stays what it is.
    is_name = first.startswith("pawl-") or not {"_", ".", "/"}.isdisjoint(first.rstrip(".,:"))
    begin = message if is_name else f"{message[:1].upper()}{message[1:]}"
    return f"{begin} {following}".rstrip()


def _as_typed(error: PawlError, typed: Mapping[str, str]) -> str:
    """Return the message of an error with what people type in place of the names of fields.

    A name that is a plain word counts where it is the field that is wrong, or stands in backquotes.
    """
    message = error.message.replace(_ID_PATTERN, _ID_WORDS)
    wrong = error.metadata.get("field", "")

    def put(found: re.Match[str]) -> str:
        name = found[2]
        is_plain = name.isalpha() and not found[1] and name not in wrong.split(".")
        return found[0] if is_plain else _option(name, typed) or found[0]

    told = _FIELD.sub(put, message)
    option = _option(wrong, typed)
    return told if told != message or option in told else f"{option}: {told}"


def _option(field: str, typed: Mapping[str, str]) -> str:
    """Return what people type for a field, or for the one that it is a part of; empty if nothing."""
    for name in reversed(field.split(".")):
        for parameter in (name, *_GIVEN_BY.get(name, ())):
            if parameter in typed:
                return typed[parameter]
    return ""
