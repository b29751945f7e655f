"""Error messages for users: what went wrong, and what to do next."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pawl.chassis.process.address import split_address
from pawl.chassis.process.start import StartError
from pawl.cli import wording
from pawl.client import NoAnswer
from pawl.client.target import SERVICES, Service
from pawl.errors import PawlError

_KEY: Final = "PAWL_API_KEY"
_KEY_REFUSED: Final = (
    f"The key came from {_KEY}. Set it to a key made here with `pawl keys create`, or to a valid token."
)

_NO_KEY: Final = "no key was sent"
_FOLDER: Final = ".pawl"

_NEXT: Final = {
    "UNAUTHENTICATED": (
        "Set PAWL_API_KEY to your key. For a suite on this machine, run the command in the folder where `pawl up` runs,"
        " or pass --data FOLDER; the local key is only sent to the addresses that `pawl up` prints."
    ),
    "TOOL_NOT_FOUND": "`pawl tools` lists the available tools.",
    "SCHEDULE_NOT_FOUND": "`pawl schedules list` shows your schedules.",
    "TRIGGER_NOT_FOUND": "`pawl triggers list` shows your triggers.",
    "TOO_MANY_JOBS": "`pawl jobs list` shows your open jobs.",
    "AGENT_NOT_FOUND": "`pawl agents list` shows the agents you may use.",
    "RUN_NOT_FOUND": "`pawl runs` shows your runs.",
    "ATTENTION_NOT_NEEDED": "`pawl attention` lists the runs that need an operator.",
    "FILE_NOT_FOUND": "`pawl files list` shows the store's files.",
    "DOCUMENT_NOT_FOUND": "`pawl documents list` shows your documents and shared ones (--shared).",
    "SOURCE_NOT_FOUND": "`pawl sources list` shows the store's sources.",
    "SOURCE_EXISTS": "Add `--replace` to replace it.",
    "RULE_NOT_FOUND": "`pawl rules list` shows your rules and the store's.",
    "KEY_NOT_FOUND": "`pawl keys list` shows the keys you manage.",
    "CONVERSATION_ERASED": "`pawl conversations erase` with its id shows the progress.",
    "FORK_POINT_OPEN": "`pawl conversations show CONV --numbers` shows the numbers.",
    "CONVERSATION_NOT_FOUND": (
        "`pawl conversations list` shows your conversations; with --shared, those of other users."
    ),
    "CONVERSATION_EXISTS": "Show it with `pawl conversations show --key`, then continue it or choose another key.",
    "CHANNEL_NOT_FOUND": "`pawl notify list` shows your channels.",
    "DELIVERY_NOT_FOUND": "`pawl notify list` shows your channels, `pawl notify deliveries ID` their deliveries.",
    "CALL_NOT_FOUND": "`pawl inbox` lists the calls that are waiting.",
    "CALL_NOT_PENDING": "`pawl inbox` lists the calls that are waiting.",
    "ALREADY_DECIDED": "`pawl inbox` lists the calls that are waiting.",
    "DEADLINE_PASSED": "`pawl inbox` lists the calls that are waiting.",
    "GRANT_NOT_OFFERED": "Approve only this call, without --series.",
    "DIGEST_MISMATCH": "Review the call again with `pawl inbox`.",
    "OVERLOADED": "Try again later.",
    "SHUTTING_DOWN": "Try again later.",
    "DEPENDENCY_UNAVAILABLE": "Try again later.",
    "DEADLINE_EXCEEDED": "Try again later.",
    "INTERNAL": "The service log has the details under that id.",
}

# For fields with an id, the reason whose advice applies if the id is invalid.
_ID_REASONS: Final = {"channel_id": "CHANNEL_NOT_FOUND", "delivery_ids": "DELIVERY_NOT_FOUND"}

# Command parameters that fill a field with a different name. The first one that the command has is used.
_PARAMETERS: Final[Mapping[str, Sequence[str]]] = {
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
    "report_percents": ("reports",),
    "report_seconds": ("reports",),
    "schema_json": ("schema",),
    "store_id": ("store_ids",),
    "time_zone": ("zone",),
    "total_tokens_max": ("tokens_max",),
}
_FIELD: Final = re.compile(r"(?<![\w.'\"/-])(`?)([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*)\1(?![\w'\"/-])")

# Signs of a TLS mismatch in gRPC error details, and what to do.
_TLS_ERRORS: Final = (
    ("WRONG_VERSION_NUMBER", "{} does not speak TLS. Leave out --ca and PAWL_TLS_CA_FILE."),
    ("certificate has expired", "The certificate at {} has expired. Ask the suite's operator to renew it."),
    (
        "Hostname Verification",
        "The certificate at {} does not have this name. Use an address listed in the certificate.",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "The certificate at {} was not issued by the CA in --ca or PAWL_TLS_CA_FILE. Pass the suite's CA certificate.",
    ),
)
_SPEAKS_TLS: Final = "{} speaks TLS. Pass its CA certificate with --ca FILE or PAWL_TLS_CA_FILE."
# A TLS server closes a connection that does not start with a TLS handshake.
_CONNECTION_CLOSED: Final = ("Socket closed", "reset by peer")
_TLS_SECONDS_MAX: Final = 2.0


class CommandError(Exception):
    """Raised when the command cannot run. The message tells users what to do next.

    `parameter` is the parameter at fault. The message shows its name as users type it.
    """

    def __init__(self, message: str, *, parameter: str = "") -> None:
        self.parameter = parameter
        super().__init__(message)


def explain(
    error: Exception, addresses: list[str], service: Service = "agent", typed: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the message for an error from calling a service at `addresses`.

    `typed` maps parameters to their names as users type them, for example `interval_seconds` to `--every`.
    """
    if isinstance(error, CommandError) and error.parameter:
        return f"{_option(error.parameter, typed) or error.parameter}: {error}"
    if isinstance(error, CommandError | StartError):
        return str(error)
    if isinstance(error, NoAnswer):
        return _about_tls(error.message, addresses) or _no_answer(addresses, service)
    if isinstance(error, PawlError):
        return _sentence(error, typed)
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        # Python replaces each byte that is not valid UTF-8 with a lone surrogate.
        return "The input is not UTF-8 text. Convert it first."
    return f"Unexpected error: {type(error).__name__}: {error}"


def _no_answer(addresses: list[str], service: Service) -> str:
    where = ", ".join(addresses)
    if service == "agent":
        return f"No Pawl suite answers at {where}. Start one with `pawl up`."
    log = f"logs/{SERVICES[service]}.log in its data folder"
    return (
        f"{SERVICES[service]} does not answer at {where}. If the suite is running, see {log};"
        " otherwise start one with `pawl up`."
    )


def _about_tls(details: str, addresses: list[str]) -> str:
    where = ", ".join(addresses)
    for sign, advice in _TLS_ERRORS:
        if sign in details:
            return advice.format(where)
    if any(sign in details for sign in _CONNECTION_CLOSED) and any(map(_speaks_tls, addresses)):
        return _SPEAKS_TLS.format(where)
    return ""


def _speaks_tls(address: str) -> bool:
    """Return whether a server responds to a TLS handshake. Its certificate is not checked."""
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
        following = _NEXT.get(_ID_REASONS.get(error.message.partition(" ")[0], ""), "")
    if error.reason == "RUN_NOT_FOUND" and (_option("job_id", typed) or "job_ids" in typed):
        following = "`pawl jobs list --all` shows your jobs."
    if error.reason == "UNAUTHENTICATED" and os.environ.get(_KEY):
        following = _KEY_REFUSED
    elif error.reason == "UNAUTHENTICATED" and message.lower().startswith(_NO_KEY) and not Path(_FOLDER).exists():
        message = f"There is no {_FOLDER} in {Path.cwd()}, so no key was found."
    first = message.partition(" ")[0]
    # The names of fields, metadata and files are not capitalized.
    is_name = first.startswith("pawl-") or not {"_", ".", "/"}.isdisjoint(first.rstrip(".,:"))
    start = message if is_name else f"{message[:1].upper()}{message[1:]}"
    return f"{start} {following}".rstrip()


def _as_typed(error: PawlError, typed: Mapping[str, str]) -> str:
    """Return an error's message with field names replaced by option names.

    A name that is also an ordinary word is replaced only if it is the invalid field or is in backquotes.
    """
    message = error.message
    wrong = error.metadata.get("field", "")

    def put(found: re.Match[str]) -> str:
        name = found[2]
        is_plain = name.isalpha() and not found[1] and name not in wrong.split(".")
        return found[0] if is_plain else _option(name, typed) or found[0]

    # Lines with a dash are about a tool's arguments, which may have the same names.
    lines = message.splitlines(keepends=True)
    replaced = "".join(line if line.startswith("- ") else _FIELD.sub(put, line) for line in lines)
    option = _option(wrong, typed)
    return replaced if replaced != message or option in replaced else f"{option}: {replaced}"


def _option(field: str, typed: Mapping[str, str]) -> str:
    for name in reversed(field.split(".")):
        for parameter in (name, *_PARAMETERS.get(name, ())):
            if parameter in typed:
                return typed[parameter]
    return ""
