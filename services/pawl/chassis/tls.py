"""TLS: the certificate of a process, read again when it changes, and the authority that it checks others by.

A service is who its certificate names: by the URI `spiffe://<any domain>/pawl/<service>`, or by the plain
DNS name `<service>`, which those who call it look for too.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import grpc

from pawl.chassis import logs
from pawl.chassis.clock import Clock
from pawl.chassis.credentials import UNKNOWN, WatchedFile
from pawl.chassis.login_failures import LoginRefused
from pawl.chassis.roles import SERVICE
from pawl.chassis.start import StartError
from pawl.errors import Unauthenticated

_SPIFFE_ID: Final = re.compile("spiffe://[^/]+/pawl/([a-z-]+)")

_NAMES_TOLD_MAX: Final = 10

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificates:
    """PEM: the certificate of this process with its chain, its private key, and the authority for those of others."""

    certificate: bytes | None = None
    key: bytes | None = None
    authority: bytes | None = None
    context: ssl.SSLContext | None = None
    """The certificate for HTTP servers; None without one."""


Tls: TypeAlias = Callable[[], Certificates]
"""Gives the certificates of this moment."""


def of_service(certificate: Path | None, key: Path | None, authority: Path | None, *, clock: Clock) -> Tls | None:
    """Return the certificates of a service, which follow their files; None if it has none.

    While the files do not go together, because one of them is just being replaced, the last ones hold.

    Raises:
        StartError: they cannot be used.
    """
    if certificate is None or key is None:
        return None

    def read(content: bytes) -> Certificates:
        private = _read(key, "PAWL_TLS_KEY_FILE")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The empty password: else OpenSSL asks on the terminal for that of a key that has one.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"it and PAWL_TLS_KEY_FILE are no certificate with its key: {error}") from None
        if (certificate.read_bytes(), key.read_bytes()) != (content, private):
            raise ValueError("it is being replaced")
        roots = None if authority is None else _check_authority(_read(authority, "PAWL_TLS_CA_FILE"))
        return Certificates(certificate=content, key=private, authority=roots, context=context)

    beside = [path for path in (key, authority) if path is not None]
    return WatchedFile(certificate, "PAWL_TLS_CERTIFICATE_FILE", read, clock, beside=beside)


def of_client(authority: Path | None, clock: Clock) -> Tls | None:
    """Return the authority by which a client without a certificate of its own checks servers; None for no TLS.

    Raises:
        StartError: the file cannot be used.
    """
    if authority is None:
        return None

    def read(content: bytes) -> Certificates:
        return Certificates(authority=_check_authority(content))

    return WatchedFile(authority, "PAWL_TLS_CA_FILE", read, clock)


def of_bus(authority: Path | None, certificate: Path | None, key: Path | None) -> Callable[[], ssl.SSLContext] | None:
    """Return what makes the context of each connection to NATS; None for that of the system.

    Without an authority the certificates of the system are for it.

    Raises:
        StartError: the files cannot be used.
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
    """Return what a gRPC listener shows, the present certificate to each new connection.

    `from_services`: only those get in who show a certificate of the authority.
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

    # The types forget that None stands for no change.
    return grpc.dynamic_ssl_server_credentials(configuration(shown), changed, from_services)  # type: ignore[arg-type]


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return what a channel shows, and checks the other end by."""
    return grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.certificate)


def server_name(addresses: str, service: str) -> str | None:
    """Return the name to look for in the certificate at some addresses; None for the host of the one address.

    With several of them gRPC does not compare each with its own host.
    """
    return service if "," in addresses or addresses.startswith("unix:") else None


def http_context(tls: Tls) -> ssl.SSLContext:
    """Return the context of an HTTP server, which shows the present certificate to each new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def show(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        present = tls().context
        if present is not None:
            connection.context = present

    # OpenSSL asks it whether the client names a server or not.
    context.sni_callback = show
    return context


def check_service(right: str, peer: Mapping[str, Iterable[bytes]]) -> None:
    """Return if the certificate that was shown on a connection is that of the service whose key was.

    `right` is the service among the callers of `roles.CALLERS`, `peer` gRPC's properties of the connection.

    Raises:
        Unauthenticated: none was shown, or that of another; the text is that for keys that are not known.
    """
    names = services_of(peer)
    if right.removeprefix(SERVICE) not in names:
        _log.warning("tls.certificate_of_another", key_of=right, certificate_of=sorted(names)[:10])
        raise Unauthenticated(UNKNOWN) from LoginRefused("certificate")


def check_own(shown: Certificates, service: str, *, is_called: bool) -> None:
    """Return if this certificate names `service`, and others compare it with an authority.

    Raises:
        StartError: it does not.
    """
    if shown.authority is None or shown.certificate is None:
        return
    from cryptography import x509  # noqa: PLC0415  # few deployments need it

    extensions = x509.load_pem_x509_certificate(shown.certificate).extensions
    names = x509.SubjectAlternativeName([])
    with suppress(x509.ExtensionNotFound):
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    plain, ids = names.get_values_for_type(x509.DNSName), names.get_values_for_type(x509.UniformResourceIdentifier)
    uris = [] if is_called else [name.encode() for name in ids]
    if service not in services_of({"peer_dns": [name.encode() for name in plain], "peer_uri": uris}):
        wanted = f"the DNS name `{service}`" + (
            "" if is_called else f" or the URI `spiffe://ANY-DOMAIN/pawl/{service}`"
        )
        has = ", ".join(f"`{name}`" for name in sorted([*plain, *ids])[:_NAMES_TOLD_MAX]) or "none"
        raise StartError(
            f"PAWL_TLS_CERTIFICATE_FILE: has not {wanted}, only {has}: the other services know this one by its name"
        )


def services_of(peer: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """Return the services whose names a verified certificate has, by gRPC's properties of the connection."""
    plain = [name.decode("utf-8", "replace") for name in peer.get("peer_dns", ())]
    ids = [_SPIFFE_ID.fullmatch(uri.decode("utf-8", "replace")) for uri in peer.get("peer_uri", ())]
    return frozenset((*plain, *(found[1] for found in ids if found)))


def _read(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {path}: {error.strerror}") from None


def _check_authority(content: bytes) -> bytes:
    """Return the certificates of an authority.

    Raises:
        ValueError: there are none.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError("PAWL_TLS_CA_FILE has no certificates of an authority in PEM") from None
    return content
