"""Sealed one-time browser login codes.

They are created by a process on the gateway's machine that has the gateway's seal key.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

# The file name of the gateways' seal key in the secrets of a data folder.
SEAL_FILE: Final = "gateway-seal.key"
# Lifetime of a code.
CODE_SECONDS: Final = 120.0


class Code(msgspec.Struct, frozen=True, kw_only=True):
    # The API key of the new session.
    key: str
    # The address of the only gateway that accepts the code.
    gateway: str
    # Unix time.
    end_time: float
    nonce: str


def close(seal_keys: str, code: Code) -> str:
    return seal(seal_keys, "code", msgspec.json.encode(code))


def read(seal_keys: str, text: str) -> Code | None:
    """Return the code in a sealed string, or None if this deployment did not seal it."""
    try:
        return msgspec.json.decode(unseal(seal_keys, "code", text) or b"", type=Code)
    except msgspec.DecodeError:
        return None


def seal(seal_keys: str, purpose: str, content: bytes) -> str:
    """Encrypt a value with the first of the comma-separated keys."""
    return _box(seal_keys, purpose).encrypt(content).decode()


def unseal(seal_keys: str, purpose: str, sealed: str) -> bytes | None:
    """Decrypt a value. Return None if none of the keys sealed it for this purpose."""
    from cryptography.fernet import InvalidToken  # noqa: PLC0415  # see below

    try:
        return _box(seal_keys, purpose).decrypt(sealed.encode())
    except (InvalidToken, UnicodeEncodeError):
        return None


@cache
def _box(seal_keys: str, purpose: str) -> MultiFernet:
    # Takes 6 MB, which a gateway without browsers does not need.
    from cryptography.fernet import Fernet, MultiFernet  # noqa: PLC0415

    keys = [key for each in seal_keys.split(",") if (key := each.strip())]
    digests = [hashlib.sha256(f"pawl gateway {purpose}\n{key}".encode()).digest() for key in keys]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
