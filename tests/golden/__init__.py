"""The log of one run, as a suite wrote it, and what everybody who reads it must tell."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
LOG: Final = _FOLDER / "run.json"
"""Its events, in the JSON of protobuf."""
GAP: Final = _FOLDER / "gap.json"
"""The gap that stands in place of them once they are not kept any more."""
TOLD: Final = _FOLDER / "told.json"
"""The rounds: text, reasoning, and calls with arguments and results."""
