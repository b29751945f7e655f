"""Extracts words from text and from search queries by the same rules."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, TooLarge

# Only this much of a message's text is indexed.
TEXT_CHARACTERS_MAX: Final = 16_384
# Maximum number of distinct words per text that are indexed.
WORDS_MAX: Final = 1000
# Longer words are indexed by their first characters.
WORD_CHARACTERS_MAX: Final = 32
QUERY_BYTES_MAX: Final = 200
QUERY_WORDS_MAX: Final = 8

# Scripts written without spaces: each character is a word.
_UNSPACED: Final = r"\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_MARK_BYTES: Final = 5


def words(text: str) -> tuple[str, ...]:
    """Return the distinct words of the text in order, case-folded and normalised. The cost is bounded."""
    folded = unicodedata.normalize("NFKC", text[:TEXT_CHARACTERS_MAX])[: 2 * TEXT_CHARACTERS_MAX].casefold()
    found = (each[0][:WORD_CHARACTERS_MAX] for each in _WORD.finditer(folded))
    distinct: dict[str, None] = {}
    for word in found:
        distinct[word] = None
        if len(distinct) == WORDS_MAX:
            break
    return tuple(distinct)


def query_words(query: str) -> tuple[str, ...]:
    """Return the word prefixes of a query, or an empty tuple if the query is empty.

    Raises:
        TooLarge: The query has more than 200 bytes.
        InvalidField: The query has no word.
    """
    if not query:
        return ()
    if len(query.encode()) > QUERY_BYTES_MAX:
        raise TooLarge(f"query must be at most {QUERY_BYTES_MAX} bytes", field="query")
    found = words(query)
    if not found:
        raise InvalidField("query has no words: use letters or digits", field="query")
    return tuple(itertools.islice(found, QUERY_WORDS_MAX))


def mark(store_id: StoreId, user_id: UserId) -> str:
    return hashlib.sha256(f"{store_id}\0{user_id}".encode()).digest()[:_MARK_BYTES].hex() + ":"
