"""Documents: texts that the model can list, read and search."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import UserId
from pawl.errors import InvalidField, TooLarge

NAME_CHARACTERS_MAX: Final = 200
TEXT_BYTES_MAX: Final = 1024 * 1024
DOCUMENTS_MAX: Final = 10_000
"""Of a store, those of its users included."""
STORE_BYTES_MAX: Final = 1024 * 1024 * 1024
PART_CHARACTERS_MAX: Final = 64 * 1024
"""The words of a part, each with its places, fit into a search vector whatever they are."""
PLAIN_LANGUAGE: Final = "simple"
LANGUAGES: Final = frozenset(
    {
        *(PLAIN_LANGUAGE, "arabic", "armenian", "basque", "catalan", "danish", "dutch", "english", "finnish", "french"),
        *("german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian", "nepali"),
        *("norwegian", "portuguese", "romanian", "russian", "serbian", "spanish", "swedish", "tamil", "turkish"),
        "yiddish",
    }
)
"""The languages that every PostgreSQL from version 14 on knows."""

STORE_OWNER: Final = UserId("")
"""The owner of documents that are the whole store's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document without its text. Times are seconds since 1970."""

    owner_id: UserId
    """A user, or STORE_OWNER."""
    name: str
    language: str
    text_bytes: int
    text_sha256: str
    create_time: float
    update_time: float

    @property
    def is_shared(self) -> bool:
        """True if it is the whole store's."""
        return self.owner_id == STORE_OWNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A document that a search has found, and where in it."""

    document: Document
    offset: int
    """Of the first snippet, in bytes."""
    snippets: tuple[str, ...]
    """Pieces of the text, with ** around the words that were looked for."""


def check_document(name: str, text: str, language: str) -> None:
    """Return if a document can be kept.

    Raises:
        InvalidField: metadata `field` names what is wrong.
        TooLarge: the text is over TEXT_BYTES_MAX.
    """
    check_name(name)
    if language not in LANGUAGES:
        raise InvalidField(f"language: must be one of {', '.join(sorted(LANGUAGES))}", field="language")
    if "\0" in text:
        raise InvalidField("text: must not have NUL characters", field="text")
    size = len(text.encode())
    if size > TEXT_BYTES_MAX:
        raise TooLarge(f"the text has {size} bytes, the limit is {TEXT_BYTES_MAX}")


def check_name(name: str) -> None:
    """Return if a document can have that name.

    Raises:
        InvalidField: it cannot.
    """
    is_plain = all(unicodedata.category(character) not in {"Cc", "Cs", "Zl", "Zp"} for character in name)
    if not (1 <= len(name) <= NAME_CHARACTERS_MAX and is_plain and name == name.strip()):
        raise InvalidField(
            f"name: must have 1 to {NAME_CHARACTERS_MAX} characters on one line, no space at its ends", field="name"
        )


def parts_of(text: str) -> list[tuple[int, str]]:
    """Return a text in parts, each with the byte of the text that it begins at; joined they are the text.

    It is cut between paragraphs, lines or words if possible.
    """
    parts = []
    start = offset = 0
    while start < len(text):
        end = _cut(text, start)
        content = text[start:end]
        parts.append((offset, content))
        start, offset = end, offset + len(content.encode())
    return parts


def _cut(text: str, start: int) -> int:
    end = start + PART_CHARACTERS_MAX
    if end >= len(text):
        return len(text)
    for separator in ("\n\n", "\n", " "):
        # In the second half, so that parts do not become many.
        found = text.rfind(separator, start + PART_CHARACTERS_MAX // 2, end)
        if found >= 0:
            return found + len(separator)
    return end
