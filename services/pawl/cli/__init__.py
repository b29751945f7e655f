"""The `pawl` command line. Except for a few commands, it uses only `pawl.client` and the public API."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C exits quietly, even during imports."""
    # gRPC logs every failed connection to stderr, including in services started here. The lines are not JSON, and any
    # client can cause them. gRPC reads the variable on import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Imports leave hardly any garbage, so garbage collection starts with the command.
    gc.disable()
    try:
        from pawl.cli.__main__ import main as run  # noqa: PLC0415  # this import takes half a second
    except KeyboardInterrupt:
        sys.exit(130)
    run()
