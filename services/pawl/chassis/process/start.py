"""Reasons why a process could not start, for people."""

from __future__ import annotations


class StartError(Exception):
    """The process cannot start; the message is one clear sentence that says what to change."""
