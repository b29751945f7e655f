"""Imports libraries without their optional dependencies, which would use megabytes of memory in every process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    """Within the block, import modules as if the package `name` were not installed.

    This has no effect if the package has already been imported.
    """
    is_imported = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # this makes its import fail
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[name]
