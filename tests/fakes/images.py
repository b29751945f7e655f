"""The smallest images that decoders take, and pieces to make others of."""

from __future__ import annotations

import base64
import struct
import zlib


def chunk(name: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int = 1, height: int = 1) -> bytes:
    """A red PNG. What stands behind its end is no part of it, so that larger ones are `png() + bytes(n)`."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + b"\xff\0\0" * width) * height))
    return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND")


def jpeg(width: int = 1, height: int = 1) -> bytes:
    """The frame of a JPEG: its tables are left out."""
    size = struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0" + size + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x2a\xff\xd9"


PNG = png()
GIF = base64.b64decode("R0lGODdhAQABAIEAAP8AAAAAAAAAAAAAACwAAAAAAQABAAAIBAABBAQAOw==")
WEBP = base64.b64decode("UklGRjwAAABXRUJQVlA4IDAAAADQAQCdASoBAAEAAUAmJaACdLoB+AADsAD+8ut//NgVzXPv9//S4P0uD9Lg/9KQAAA=")
IMAGES = {"image/png": PNG, "image/jpeg": jpeg(), "image/gif": GIF, "image/webp": WEBP}
"""By type, each 1 x 1."""
