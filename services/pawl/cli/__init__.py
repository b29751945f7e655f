"""`pawl`: the command line.

A client of the public API only, by `pawl.client` as any other program.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is being loaded ends it as quietly as later."""
    # People get sentences of ours. gRPC's own lines about each failed connection, also of services that are started
    # here, are no JSON, and any stranger can cause them. It looks when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from pawl.cli.__main__ import main as run  # noqa: PLC0415  # what takes half a second is this import
    except KeyboardInterrupt:
        sys.exit(130)
    run()
