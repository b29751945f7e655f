"""The code of a helper process, which applies the registry's functions to untrusted data within limits."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import time
from typing import Any, BinaryIO, Final

from pawl.tool_registry.rules import check  # noqa: F401  # imported early, so that the first job does not wait for it

MEMORY_BYTES_MAX: Final = 1536 * 1024 * 1024
# Exit status when a job exceeds its memory limit.
OUT_OF_MEMORY: Final = 3
_LENGTH_BYTES: Final = 4
_NICENESS: Final = 5


def main() -> None:
    """Read requests from standard input and write answers to standard output, until standard input is closed."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Use duplicates, so that nothing else writes to the channel.
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        while request := _read(requests):
            try:
                answer = _answer(request)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            answers.write(len(answer).to_bytes(_LENGTH_BYTES, "big"))
            answers.write(answer)
            answers.flush()


def _read(requests: BinaryIO) -> bytes:
    return requests.read(int.from_bytes(requests.read(_LENGTH_BYTES), "big"))


def _answer(request: bytes) -> bytes:
    """Return the CPU time used, and the function's value or the exception that it raised.

    The signal for exceeding the CPU limit is not caught and ends the process.
    """
    function, arguments, cpu_seconds = pickle.loads(request)  # noqa: S301  # from the registry that started it
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    started = time.process_time()
    found: tuple[bool, Any]
    try:
        found = (True, function(*arguments))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # the registry handles it
        found = (False, error)
    answer = pickle.dumps((time.process_time() - started, *found))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer
