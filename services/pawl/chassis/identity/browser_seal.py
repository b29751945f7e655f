"""Codes that log a browser in once: made by who holds the seal of the gateways, on the machine that they run on."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

SEAL_FILE: Final = "gateway-seal.key"
"""The name of the secret by which the gateways of a data folder seal."""
CODE_SECONDS: Final = 120.0
"""The time for which a code can be used."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The login that a code stands for."""

    key: str
    """The key of the session that it gives."""
    gateway: str
    """The address of the one gateway at which it counts."""
    end_time: float
    """Unix seconds."""
    nonce: str


def close(seal_keys: str, code: Code) -> str:
    """Return a code as text."""
    return box(seal_keys, "code").encrypt(msgspec.json.encode(code)).decode()


def read(seal_keys: str, text: str) -> Code | None:
    """Return what a text stands for; None if it is no code of this deployment."""
    try:
        return msgspec.json.decode(box(seal_keys, "code").decrypt(text.encode()), type=Code)
    except (InvalidToken, msgspec.DecodeError, UnicodeEncodeError):
        return None


def box(seal_keys: str, purpose: str) -> MultiFernet:
    """Return what seals for one purpose. The first of several keys (commas between) seals; each of them opens."""
    keys = [key for each in seal_keys.split(",") if (key := each.strip())]
    digests = [hashlib.sha256(f"pawl gateway {purpose}\n{key}".encode()).digest() for key in keys]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
