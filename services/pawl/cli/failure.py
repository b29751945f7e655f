"""The words for a person when something cannot be done: one sentence, and what to do next."""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final, Literal, TypeAlias

import grpc

from pawl.chassis.settings import split_address
from pawl.chassis.status import from_rpc_error
from pawl.cli.client import Refused
from pawl.errors import PawlError, by_reason

Asks: TypeAlias = Literal["agent", "tools", "notifications", "keys"]
"""The service that a command talks to."""

SERVICES: Final = {
    "agent": "agent-loop",
    "tools": "tool-registry",
    "notifications": "notifier",
    "keys": "job-store",
}
"""The names of the services, in logs and certificates."""
_DETAILS_KEY: Final = "grpc-status-details-bin"
_KEY: Final = "PAWL_API_KEY"
_NOT_TAKEN: Final = (
    f"It came from {_KEY}: set that to a key that `pawl keys create` made here, or to a token that is still good."
)

_NEXT: Final = {
    "UNAUTHENTICATED": (
        "Set PAWL_API_KEY to your key. That of a suite on this machine is found without, in the folder where"
        " `pawl up` runs or with --data FOLDER, for addresses as `pawl up` shows them while no other user listens"
        " there."
    ),
    "RUN_NOT_FOUND": "`pawl runs` lists yours.",
    "ATTENTION_NOT_NEEDED": "`pawl attention` lists the runs that need an operator.",
    "NO_TOKEN_BUDGET": "It uses as many as it needs.",
    "DOCUMENT_NOT_FOUND": "`pawl documents list` shows those that you can see; --shared means those of the store.",
    "SOURCE_NOT_FOUND": "`pawl sources list` shows those of the store.",
    "SOURCE_EXISTS": "Add `--replace` to put this one in its place.",
    "KEY_NOT_FOUND": "`pawl keys list` shows those that you govern.",
    "CONVERSATION_NOT_FOUND": "`pawl runs` shows your conversations.",
    "CALL_NOT_FOUND": "`pawl inbox` lists the calls that wait.",
    "CALL_NOT_PENDING": "`pawl inbox` lists the calls that wait.",
    "ALREADY_DECIDED": "`pawl inbox` lists the calls that wait.",
    "DEADLINE_PASSED": "`pawl inbox` lists the calls that wait.",
    "DIGEST_MISMATCH": "Look at the call again with `pawl inbox`.",
    "OVERLOADED": "Try again in a moment.",
    "SHUTTING_DOWN": "Try again in a moment.",
    "DEPENDENCY_UNAVAILABLE": "Try again in a moment.",
    "DEADLINE_EXCEEDED": "Try again in a moment.",
    "INTERNAL": "The log of the service has the details under that id.",
}


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
    """A command cannot be carried out; the message is for people and says what to do next."""


def explain(error: Exception, addresses: list[str], asks: Asks = "agent") -> str:
    """Return what to tell about an error of a call to `addresses` of a service."""
    if isinstance(error, CommandError):
        return str(error)
    if isinstance(error, Refused):
        known = by_reason.get(error.receipt.reason, PawlError)
        return _sentence(known.restore(str(error), error.receipt.reason, {}))
    if isinstance(error, grpc.aio.AioRpcError):
        if _unreachable(error):
            return _about_tls(error.details() or "", addresses) or _silent(addresses, asks)
        return _sentence(from_rpc_error(error))
    if isinstance(error, PawlError):
        return _sentence(error)
    if isinstance(error, ConnectionError | TimeoutError):
        return _silent(addresses, asks)
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


def _unreachable(error: grpc.aio.AioRpcError) -> bool:
    """Return whether nobody answered. A service that is there says itself what it cannot reach."""
    answered = any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return error.code() is grpc.StatusCode.UNAVAILABLE and not answered


def _sentence(error: PawlError) -> str:
    message = error.message.rstrip(". ")
    following = _NEXT.get(error.reason, "")
    if error.reason == "UNAUTHENTICATED" and os.environ.get(_KEY):
        following = _NOT_TAKEN
    first = message.partition(" ")[0]
    # The name of a field, or of metadata, stays what it is.
    begin = message if "_" in first or first.startswith("pawl-") else f"{message[:1].upper()}{message[1:]}"
    return f"{begin}. {following}".rstrip()
