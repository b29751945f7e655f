"""Short-lived certificate authorities, with files as operators have them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc import tls

EXPIRED = datetime.now(UTC) - timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    certificate: Path
    key: Path
    authority: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PAWL_TLS_CERTIFICATE_FILE": str(self.certificate),
            "PAWL_TLS_KEY_FILE": str(self.key),
            "PAWL_TLS_CA_FILE": str(self.authority),
        }


def of(folder: Path, name: str) -> Files:
    return Files(
        certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / f"{name}-authority.pem"
    )


def write(folder: Path, name: str, *trusted: trustme.CA, names: tuple[str, ...] = (), expired: bool = False) -> Files:
    """Write a certificate by the first authority for a service that trusts all authorities, replacing old files.

    It names the service and this machine, or `names`.
    """
    identities = names or (name, "localhost", "127.0.0.1")
    if expired:
        issued = trusted[0].issue_cert(*identities, not_before=EXPIRED - timedelta(days=1), not_after=EXPIRED)
    else:
        issued = trusted[0].issue_cert(*identities)
    files = of(folder, name)
    _replace(files.authority, b"".join(authority.cert_pem.bytes() for authority in trusted))
    _replace(files.key, issued.private_key_pem.bytes())
    _replace(files.certificate, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    return files


def tls_of(files: Files, clock: Clock) -> tls.Tls:
    found = tls.of_service(files.certificate, files.key, files.authority, clock=clock)
    assert found is not None
    return found


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.chmod(0o600)
    part.replace(path)
