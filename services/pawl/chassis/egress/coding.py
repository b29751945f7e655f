"""Unpacking what servers send packed, no further than it is wanted."""

from __future__ import annotations

import zlib
from typing import Final

_GZIP: Final = 16 + zlib.MAX_WBITS


class CodingError(Exception):
    """A body that is not packed as its header says, or in a way that was not asked for."""


class Unpacker:
    """Unpacks a body while it comes in, and stops as soon as it is longer than wanted.

    Of a small body that unpacks to a huge one, no more than `bytes_max` + 1 bytes
    are ever made.

    Raises:
        CodingError: the coding is not gzip, or the body is broken.
    """

    def __init__(self, coding: str, *, bytes_max: int) -> None:
        self.body = bytearray()
        self._bytes_max = bytes_max
        coding = coding.strip().lower()
        self._is_packed = coding in ("gzip", "x-gzip")
        if not self._is_packed and coding not in ("", "identity"):
            raise CodingError("the body is packed in a way that was not asked for")
        self._inflate: zlib._Decompress | None = None

    @property
    def is_full(self) -> bool:
        """True if the body is longer than wanted."""
        return len(self.body) > self._bytes_max

    def feed(self, part: bytes) -> None:
        """Unpack the next part."""
        if not self._is_packed:
            self.body += part[: self._bytes_max + 1 - len(self.body)]
            return
        while part and not self.is_full:
            if self._inflate is None:
                self._inflate = zlib.decompressobj(_GZIP)
            try:
                self.body += self._inflate.decompress(part, self._bytes_max + 1 - len(self.body))
            except zlib.error:
                raise CodingError("the packed body is broken") from None
            if self._inflate.eof:
                # RFC 1952, 2.2: a gzip file is any number of members, one after the other. Some are padded with NULs.
                part, self._inflate = self._inflate.unused_data.lstrip(b"\0"), None
            else:
                part = self._inflate.unconsumed_tail

    def end(self) -> None:
        """Say that nothing more comes."""
        if self._inflate is not None:
            raise CodingError("the packed body ends in the middle")
