"""What every channel shows of untrusted text (HITL-3)."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

from pawl.chassis.visible import shortened, visible

# The same file is read by web/console/test/visible.test.ts.
TABLE = json.loads((Path(__file__).parents[2] / "golden/visible.json").read_bytes())


def test_hidden_characters_and_look_alike_hosts_are_marked_once() -> None:
    assert [(visible(text), visible(shown)) for text, shown in TABLE] == [(shown, shown) for _, shown in TABLE]


def test_no_format_character_of_unicode_is_left_out() -> None:
    formats = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in {"Cc", "Cf", "Zl", "Zp"}]
    assert [text for text in formats if text not in "\t\n" and visible(text) == text] == []


def test_a_text_is_cut_on_a_character_and_outside_of_a_mark() -> None:
    shown = "ü" + visible("\u202e" * 5)
    cuts = {shortened(shown, size) for size in range(4, len(shown.encode()) + 1)}
    assert cuts == {"...", "ü...", "ü<U+202E>...", *("ü" + "<U+202E>" * n + "..." for n in (2, 3, 4)), shown}
