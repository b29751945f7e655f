"""The PostgreSQL account for launchers started by root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pawl.launcher import postgres


def test_concurrent_launchers_create_the_account_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second creation would change its uid and take the first launcher's clusters from it."""
    made: list[str] = []
    both_look = threading.Barrier(2)
    thread_state = threading.local()

    def own_account() -> pwd.struct_passwd | None:
        found = pwd.getpwuid(os.getuid()) if made else None
        if not getattr(thread_state, "first", False):
            thread_state.first = True
            both_look.wait(timeout=60)
        return found

    def run(arguments: list[str], **_: Any) -> None:
        made.append(arguments[-1])

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/sbin/useradd")
    monkeypatch.setattr(postgres, "_own_account", own_account)
    monkeypatch.setattr(subprocess, "run", run)
    with ThreadPoolExecutor(2) as launchers:
        accounts = {found.result() for found in [launchers.submit(postgres.database_account) for _ in range(2)]}
    assert made == ["pgserver"]
    assert len(accounts) == 1
