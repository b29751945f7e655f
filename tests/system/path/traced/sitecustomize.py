"""Python imports this at the start of a process: writes when the functions in TRACED_FUNCTIONS are called."""

import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

_WANTED = frozenset(os.environ.get("TRACED_FUNCTIONS", "").split())


def _trace(folder: str) -> None:
    names: dict[CodeType, str | None] = {}
    calls = open(os.path.join(folder, f"{os.getpid()}.calls"), "a", buffering=1)  # noqa: SIM115, PTH118, PTH123

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in names:
            full = f"{frame.f_globals.get('__name__')}:{code.co_qualname}"
            names[code] = full if full in _WANTED else None
        if name := names[code]:
            calls.write(f"{time.monotonic_ns()} {name}\n")

    threading.setprofile(note)
    sys.setprofile(note)


if _WANTED:
    _trace(os.environ["TRACED_FOLDER"])
