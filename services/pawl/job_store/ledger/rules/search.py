"""Words of texts, and those that a search looks for: the same rule for both."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, TooLarge

TEXT_CHARACTERS_MAX: Final = 16_384
"""So much of a text can be found by."""
WORDS_MAX: Final = 1000
"""The different words of a text by which it can be found."""
WORD_CHARACTERS_MAX: Final = 32
"""A longer word is found by its beginning."""
QUERY_BYTES_MAX: Final = 200
QUERY_WORDS_MAX: Final = 8

# Scripts that are written without spaces: each character stands for itself.
_UNSPACED: Final = r"\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_MARK_BYTES: Final = 5


def words(text: str) -> tuple[str, ...]:
    """Return the different words of a text in order, in one case and one form of Unicode; the cost has a bound."""
    folded = unicodedata.normalize("NFKC", text[:TEXT_CHARACTERS_MAX])[: 2 * TEXT_CHARACTERS_MAX].casefold()
    found = (each[0][:WORD_CHARACTERS_MAX] for each in _WORD.finditer(folded))
    distinct: dict[str, None] = {}
    for word in found:
        distinct[word] = None
        if len(distinct) == WORDS_MAX:
            break
    return tuple(distinct)


def query_words(query: str) -> tuple[str, ...]:
    """Return the words with which those of a text must begin; none for an empty query.

    Raises:
        TooLarge: it has more than 200 bytes.
        InvalidField: it has no word.
    """
    if not query:
        return ()
    if len(query.encode()) > QUERY_BYTES_MAX:
        raise TooLarge(f"query has at most {QUERY_BYTES_MAX} bytes", field="query")
    found = words(query)
    if not found:
        raise InvalidField("query has no word: give letters or digits to look for", field="query")
    return tuple(itertools.islice(found, QUERY_WORDS_MAX))


def mark(store_id: StoreId, user_id: UserId) -> str:
    """Return what the words of a user begin with in the index that all share."""
    return hashlib.sha256(f"{store_id}\0{user_id}".encode()).digest()[:_MARK_BYTES].hex() + ":"
