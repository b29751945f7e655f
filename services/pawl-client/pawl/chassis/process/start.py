"""Defines the error that keeps a process from starting."""

from __future__ import annotations


class StartError(Exception):
    """Raised when the process cannot start. The message is one sentence that says what must be changed."""
