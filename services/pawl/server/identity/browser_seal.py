"""Sealed one-time browser login codes.

They are created by a process on the gateway's machine that has the gateway's seal key.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

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
    return box(seal_keys, "code").encrypt(msgspec.json.encode(code)).decode()


def read(seal_keys: str, text: str) -> Code | None:
    """Return the code in a sealed string, or None if this deployment did not seal it."""
    try:
        return msgspec.json.decode(box(seal_keys, "code").decrypt(text.encode()), type=Code)
    except (InvalidToken, msgspec.DecodeError, UnicodeEncodeError):
        return None


def box(seal_keys: str, purpose: str) -> MultiFernet:
    """Return the cipher for one purpose.

    The first of the comma-separated keys encrypts, and all of them can decrypt.
    """
    keys = [key for each in seal_keys.split(",") if (key := each.strip())]
    digests = [hashlib.sha256(f"pawl gateway {purpose}\n{key}".encode()).digest() for key in keys]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
