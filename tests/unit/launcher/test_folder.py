"""The data folder: private secrets, one launcher at a time, and clear errors."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.chassis.process.start import StartError
from pawl.launcher import postgres
from pawl.launcher.folder import DataFolder, SecretFiles, problem_of


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_secret_is_created_once(tmp_path: Path) -> None:
    first = SecretFiles(tmp_path / "secrets").get("key")
    assert len(first) >= 32
    assert SecretFiles(tmp_path / "secrets").get("key") == first
    assert SecretFiles(tmp_path / "secrets").get("other") != first


def test_secret_file_permissions_are_restored(tmp_path: Path) -> None:
    """I22: reading a secret restores its permissions."""
    folder = tmp_path / "secrets"
    secrets = SecretFiles(folder)
    secrets.get("key")
    assert (mode(folder), mode(secrets.path("key"))) == (0o700, 0o600)
    folder.chmod(0o755)
    secrets.path("key").chmod(0o644)
    SecretFiles(folder).get("key")
    assert (mode(folder), mode(secrets.path("key"))) == (0o700, 0o600)


def test_a_replaced_secret_is_private_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path)
    secrets.put("url", "a")
    secrets.put("url", "b")
    assert secrets.get("url") == "b"
    assert mode(secrets.path("url")) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["url"]


def test_two_launchers_cannot_lock_one_folder(tmp_path: Path) -> None:
    first, second = DataFolder(tmp_path), DataFolder(tmp_path)
    first.open()
    with pytest.raises(StartError, match=rf"is already running in .* \(process {os.getpid()}\)"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_stale_lock_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("99999999\n")
    folder = DataFolder(tmp_path)
    folder.open()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    folder.close()


def test_a_folder_from_another_version_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """I23: a folder of the current version can be opened repeatedly."""
    (tmp_path / "VERSION").write_text("7\n")
    with pytest.raises(StartError, match="has data version 7, but this version of Pawl reads version 1"):
        DataFolder(tmp_path).open()
    assert (tmp_path / "VERSION").read_text() == "7\n"
    (tmp_path / "VERSION").write_text("1\n")
    folder = DataFolder(tmp_path)
    for _ in range(2):
        folder.open()
        folder.close()
        folder.close()


def test_a_foreign_folder_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    before = mode(tmp_path)
    with pytest.raises(StartError, match="is not empty and is not a Pawl data folder"):
        DataFolder(tmp_path).open()
    assert mode(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_folder_that_cannot_be_created_gives_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"cannot be used: Not a directory"):
        DataFolder(tmp_path / "file" / "data").open()


def test_a_full_disk_and_a_missing_folder_give_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(tmp_path) == ""
    assert "is no longer usable (No such file or directory)" in problem_of(tmp_path / "gone")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 * 2**20))
    assert problem_of(tmp_path).startswith(f"The disk with the data folder {tmp_path} is full (5 MiB free)")


def test_concurrent_launchers_create_the_account_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second account would have another uid, which could not read the first launcher's clusters."""
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
