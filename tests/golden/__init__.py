"""The recorded log of one run, and the result that every reader must produce from it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
# The events, in protobuf JSON.
LOG: Final = _FOLDER / "run.json"
# The gap that replaces them after retention has removed them.
GAP: Final = _FOLDER / "gap.json"
# The rounds: text, reasoning, and calls with arguments and results.
TOLD: Final = _FOLDER / "told.json"
