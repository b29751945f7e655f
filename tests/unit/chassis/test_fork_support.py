"""Whatever starts a program must not run gRPC's fork handlers in the child."""

from __future__ import annotations

import subprocess
import sys

ENTRIES = [
    *(f"pawl.{name}.__main__" for name in ("agent_loop", "job_store", "notifier", "tool_registry", "cli")),
    "pawl.launcher",
    "pawl.worker",
]
# Ends where gRPC would read the variable, at its own import: what the chassis sets after that has no effect.
PROGRAM = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import {}
"""


def test_fork_support_is_off_before_grpc_is_imported() -> None:
    told = {
        entry: subprocess.check_output([sys.executable, "-c", PROGRAM.format(entry)], text=True).strip()
        for entry in ENTRIES
    }
    assert told == dict.fromkeys(ENTRIES, "false")
