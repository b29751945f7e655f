from __future__ import annotations


class StartError(Exception):
    """Raised when the process cannot start. The message is one sentence that explains what must be changed."""
