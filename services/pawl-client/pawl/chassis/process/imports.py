"""Imports libraries without their optional dependencies. These would cost every process megabytes of memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    """Import modules in the block as if the package `name` were not installed, unless it is already imported."""
    is_imported = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # this makes its import fail
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[name]
