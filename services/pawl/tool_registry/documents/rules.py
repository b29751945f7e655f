"""Documents, which the model can list, read and search."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import UserId
from pawl.errors import InvalidField, TooLarge

NAME_CHARACTERS_MAX: Final = 200
TEXT_BYTES_MAX: Final = 1024 * 1024
# Per store, including the documents of its users.
DOCUMENTS_MAX: Final = 10_000
STORE_BYTES_MAX: Final = 1024 * 1024 * 1024
# Small enough that a part's words and their positions always fit into a tsvector.
PART_CHARACTERS_MAX: Final = 64 * 1024
PLAIN_LANGUAGE: Final = "simple"
# Text search configurations that every PostgreSQL has had since version 14.
LANGUAGES: Final = frozenset(
    {
        *(PLAIN_LANGUAGE, "arabic", "armenian", "basque", "catalan", "danish", "dutch", "english", "finnish", "french"),
        *("german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian", "nepali"),
        *("norwegian", "portuguese", "romanian", "russian", "serbian", "spanish", "swedish", "tamil", "turkish"),
        "yiddish",
    }
)

# The owner of documents that belong to the whole store.
STORE_OWNER: Final = UserId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document without its text. Times are seconds since 1970."""

    # A user, or STORE_OWNER.
    owner_id: UserId
    name: str
    language: str
    text_bytes: int
    text_sha256: str
    create_time: float
    update_time: float

    @property
    def is_shared(self) -> bool:
        return self.owner_id == STORE_OWNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    document: Document
    # Byte offset of the first snippet in the text.
    offset: int
    # Excerpts of the text, with matched words between **.
    snippets: tuple[str, ...]


def check_document(name: str, text: str, language: str) -> None:
    """Check that a document may be stored.

    Raises:
        InvalidField: A field is invalid. The `field` metadata names it.
        TooLarge: The text exceeds TEXT_BYTES_MAX.
    """
    check_name(name)
    if language not in LANGUAGES:
        raise InvalidField(f"language must be one of {', '.join(sorted(LANGUAGES))}", field="language")
    if "\0" in text:
        raise InvalidField("text must not contain NUL characters", field="text")
    size = len(text.encode())
    if size > TEXT_BYTES_MAX:
        raise TooLarge(f"the text is {size} bytes, over the limit of {TEXT_BYTES_MAX}")


def check_name(name: str) -> None:
    is_plain = all(unicodedata.category(character) not in {"Cc", "Cs", "Zl", "Zp"} for character in name)
    if not (1 <= len(name) <= NAME_CHARACTERS_MAX and is_plain and name == name.strip()):
        raise InvalidField(
            f"name must be one line of 1 to {NAME_CHARACTERS_MAX} characters, without leading or trailing spaces",
            field="name",
        )


def parts_of(text: str) -> list[tuple[int, str]]:
    """Split text into parts, each with its byte offset. Joined together, the parts are the original text.

    Where possible, the text is split between paragraphs, lines or words.
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
        # Split only in the second half, to limit the number of parts.
        found = text.rfind(separator, start + PART_CHARACTERS_MAX // 2, end)
        if found >= 0:
            return found + len(separator)
    return end
