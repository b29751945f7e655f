"""TLS certificates. A process has its own certificate and the CA certificates that verify its peers.

A certificate identifies a service by the URI `spiffe://<any domain>/pawl/<service>` or by the DNS name `<service>`.
Clients also verify this identity.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

from pawl.chassis.identity.auth import UNKNOWN, LoginRefused
from pawl.chassis.identity.roles import SERVICE
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.start import StartError
from pawl.chassis.process.watched_file import WatchedFile
from pawl.errors import Unauthenticated

_SPIFFE_ID: Final = re.compile("spiffe://[^/]+/pawl/([a-z-]+)")

_NAMES_SHOWN_MAX: Final = 10
_FLIGHTS_MAX: Final = 4
# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUT_OF_TIME: Final = (9, 10)

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificates:
    """The certificate chain of this process, its private key, and the authority that verifies peers, all in PEM."""

    certificate: bytes | None = None
    key: bytes | None = None
    authority: bytes | None = None
    # For HTTP servers; None if there is no certificate.
    context: ssl.SSLContext | None = None


# Returns the current certificates.
Tls: TypeAlias = Callable[[], Certificates]


def of_service(certificate: Path | None, key: Path | None, authority: Path | None, *, clock: Clock) -> Tls | None:
    """Return the certificates of a service, or None if it has none. They are reloaded when the files change.

    While the files do not match, for example during a replacement, the previous certificates stay in use.

    Raises:
        StartError: The files cannot be used.
    """
    if certificate is None or key is None:
        return None

    def read(content: bytes) -> Certificates:
        private = _read(key, "PAWL_TLS_KEY_FILE")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # With an empty password, OpenSSL does not ask for one on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"it does not match PAWL_TLS_KEY_FILE: {error}") from None
        if (certificate.read_bytes(), key.read_bytes()) != (content, private):
            raise ValueError("it is being replaced")
        roots = None if authority is None else _check_authority(_read(authority, "PAWL_TLS_CA_FILE"))
        return Certificates(certificate=content, key=private, authority=roots, context=context)

    beside = [path for path in (key, authority) if path is not None]
    return WatchedFile(certificate, "PAWL_TLS_CERTIFICATE_FILE", read, clock, beside=beside)


def of_client(authority: Path | None, clock: Clock) -> Tls | None:
    """Return the CA certificates for a client that has no certificate of its own, or None if it does not use TLS.

    Raises:
        StartError: The file cannot be used.
    """
    if authority is None:
        return None

    def read(content: bytes) -> Certificates:
        return Certificates(authority=_check_authority(content))

    return WatchedFile(authority, "PAWL_TLS_CA_FILE", read, clock)


def of_bus(authority: Path | None, certificate: Path | None, key: Path | None) -> Callable[[], ssl.SSLContext] | None:
    """Return a factory of TLS contexts for connections to NATS, or None for the default context.

    Without an authority, a context trusts the system's CA certificates.

    Raises:
        StartError: The files cannot be used.
    """
    if authority is None and certificate is None:
        return None

    def context() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            made.load_cert_chain(certificate, key, password="")
        return made

    try:
        context()
    except OSError as error:
        raise StartError(f"PAWL_TLS_CA_FILE: cannot use {authority}: {error.strerror or error}") from None
    return context


def server_credentials(tls: Tls, *, from_services: bool) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC listener. Each new connection gets the current certificate.

    With `from_services`, clients must present a certificate from the authority.
    """
    shown = tls()

    def configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
        roots = certificates.authority if from_services else None
        pair = (certificates.key or b"", certificates.certificate or b"")
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        present = tls()
        if present is shown:
            return None
        shown = present
        return configuration(present)

    # The type stubs omit that None means no change.
    return grpc.dynamic_ssl_server_credentials(configuration(shown), changed, from_services)  # type: ignore[arg-type]


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.certificate)


def server_name(addresses: str, service: str) -> str | None:
    """Return the name to verify in server certificates. None means the host in the single address.

    With several addresses, gRPC does not compare each certificate with its own host, so the service's name is used.
    """
    return service if "," in addresses or addresses.startswith("unix:") else None


def http_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server. Each new connection gets the current certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def show(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        present = tls().context
        if present is not None:
            connection.context = present

    # OpenSSL calls it even if the client sends no server name.
    context.sni_callback = show
    return context


def check_service(right: str, peer: Mapping[str, Iterable[bytes]]) -> None:
    """Check that the peer's certificate names the service whose key it sent.

    `right` is the service's entry in `roles.CALLERS`. `peer` contains gRPC's properties of the connection.

    Raises:
        Unauthenticated: The certificate is missing or names another service. The message is the same as for an unknown
            key.
    """
    names = services_of(peer)
    if right.removeprefix(SERVICE) not in names:
        _log.warning("tls.certificate_mismatch", key_of=right, certificate_of=sorted(names)[:10])
        raise Unauthenticated(UNKNOWN) from LoginRefused("certificate")


def check_own(shown: Certificates, service: str, *, is_called: bool) -> None:
    """Check that other services will accept this certificate for `service`.

    `is_called` means that the other services connect to `service`. An expired certificate is accepted, because it can
    be replaced while the process runs. Without an authority, nothing is checked.

    Raises:
        StartError: The authority did not sign the certificate, or the name is missing.
    """
    if shown.authority is None or shown.context is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN  # Like gRPC.
    context.load_verify_locations(cadata=shown.authority.decode("ascii"))
    try:
        names = _greet(context, shown.context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_TIME:
            return
        why = f"is not signed by the authority in PAWL_TLS_CA_FILE: {error.verify_message}"
        raise StartError(f"PAWL_TLS_CERTIFICATE_FILE {why}") from None
    if wrong := name_missing(names, service, is_called=is_called):
        raise StartError(f"PAWL_TLS_CERTIFICATE_FILE {wrong}: other services identify this one by its name")


def name_missing(names: Sequence[tuple[str, str]], service: str, *, is_called: bool) -> str:
    """Return the problem if none of these names identifies the service, or an empty string."""
    plain = [name.encode() for kind, name in names if kind == "DNS"]
    ids = [] if is_called else [name.encode() for kind, name in names if kind == "URI"]
    if service in services_of({"peer_dns": plain, "peer_uri": ids}):
        return ""
    has = ", ".join(f"`{name}`" for name in sorted(name for _, name in names)[:_NAMES_SHOWN_MAX]) or "none"
    if is_called:
        return f"lacks the DNS name `{service}`; it has {has}"
    return f"has neither the DNS name `{service}` nor the URI `spiffe://ANY-DOMAIN/pawl/{service}`, only {has}"


def _greet(client: ssl.SSLContext, server: ssl.SSLContext) -> list[tuple[str, str]]:
    """Perform a handshake in memory, and return the names in the certificate that the client has verified.

    Raises:
        ssl.SSLCertVerificationError: The client rejects the certificate.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for end in ends * _FLIGHTS_MAX:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    verified: dict[str, Any] = ends[0].getpeercert() or {}
    return [(str(kind), str(name)) for kind, name in verified.get("subjectAltName", ())]


def services_of(peer: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """Return the services that a verified certificate names, from gRPC's properties of the connection."""
    plain = [name.decode("utf-8", "replace") for name in peer.get("peer_dns", ())]
    ids = [_SPIFFE_ID.fullmatch(uri.decode("utf-8", "replace")) for uri in peer.get("peer_uri", ())]
    return frozenset((*plain, *(found[1] for found in ids if found)))


def _read(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {path}: {error.strerror}") from None


def _check_authority(content: bytes) -> bytes:
    """Return `content` if it contains CA certificates.

    Raises:
        ValueError: It contains no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError("PAWL_TLS_CA_FILE has no PEM certificates") from None
    return content
