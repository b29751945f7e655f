"""A disk that can lose its power: an ext4 file system in a file, which the kernel can shut down.

`cut` uses ext4's own shutdown: from then on nothing reaches the file, neither data nor the file system's journal, and
every write fails. Unsynced data is gone at the next mount, as after a power cut. Not simulated: drives that report
writes as stored too early, and torn sectors.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

# From the kernel's ext4: _IOR('X', 125, __u32), and its flag for "without flushing the log".
_EXT4_IOC_SHUTDOWN = 0x8004587D
_EXT4_GOING_FLAGS_NOLOGFLUSH = 2
_SIZE_BYTES = 1 << 30
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount", "sync")
_BUSY_SECONDS_MAX = 120.0


class Disk:
    """An ext4 file system that is mounted on `place`."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "disk.img"
        self.place = folder / "disk"

    def make(self) -> str:
        """Create and mount the file system. Return why that is not possible, or an empty string."""
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            return f"mounting a disk image needs root and {', '.join(missing or _TOOLS)}"
        self.place.mkdir()
        with self._image.open("wb") as image:
            image.truncate(_SIZE_BYTES)
        for command in (["mkfs.ext4", "-q", "-F", str(self._image)], self._mount_command()):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"{command[0]} fails: {done.stderr.strip()}"
        return self._why_not_cut()

    def take(self, folder: Path) -> None:
        """Move a folder to this disk, sync it, and leave a link to it."""
        place = self.place / folder.name
        shutil.copytree(folder, place)
        owner = folder.stat()
        for path in (place, *place.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
        shutil.rmtree(folder)
        folder.symlink_to(place)
        self.sync()

    def sync(self) -> None:
        _run("sync", "--file-system", str(self.place))

    def cut(self) -> None:
        """Drop all unsynced data and make all further writes fail."""
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _EXT4_GOING_FLAGS_NOLOGFLUSH))
        finally:
            os.close(descriptor)

    def mount(self) -> None:
        """Mount the file system again, which recovers from its journal."""
        _run(*self._mount_command())

    async def unmount(self) -> None:
        """Unmount the file system once no process uses it. Idempotent."""
        async with asyncio.timeout(_BUSY_SECONDS_MAX):
            while self.place.is_mount():
                done = subprocess.run(["umount", str(self.place)], capture_output=True, check=False)  # noqa: ASYNC221
                if done.returncode != 0:
                    await asyncio.sleep(0.05)

    def _mount_command(self) -> list[str]:
        # By default ext4 writes its journal every 5 s, which would hide missing syncs.
        return ["mount", "-o", "loop,commit=300", str(self._image), str(self.place)]

    def _why_not_cut(self) -> str:
        """Cut the empty disk once. Return why that does not work, or an empty string."""
        (self.place / "never-synced").write_text("x")
        try:
            self.cut()
        except OSError as error:
            return f"this file system cannot be shut down: {error.strerror}"
        _run("umount", str(self.place))
        self.mount()
        return "the cut keeps what was not synced" if (self.place / "never-synced").exists() else ""


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
