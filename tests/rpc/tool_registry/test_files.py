"""FileService: files enter and leave the store's folder whole or not at all (TOOL-7, I13)."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.ids import StoreId
from pawl.tool.v1 import file_pb2
from pawl.tool_registry.builtin.files import rpc
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rules import FileLimits
from pawl.tool_registry.builtin.files.tools import file_tools
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import Registry, all_pages, content, refusal, running

MIB = 1024 * 1024
LIMITS = FileLimits(store_bytes_max=100_000, large_bytes_max=80_000)


@dataclass
class Desk:
    registry: Registry
    folder: Path

    def put(self, path: str, pieces: Iterable[bytes], *, store: str = "acme", user: str = "ann") -> Any:
        return self.registry.files[store, user].PutFile(_requests(path, pieces))

    async def get(self, path: str, *, store: str = "acme", user: str = "ann") -> bytes:
        stream = self.registry.files[store, user].GetFile(file_pb2.GetFileRequest(path=path))
        first, *others = [response async for response in stream]
        got = b"".join(response.content for response in others)
        assert len(got) == first.size_bytes
        return got

    async def listed(self, path: str = "", *, store: str = "acme", page_size: int = 0) -> list[tuple[str, int]]:
        request = file_pb2.ListFilesRequest(path=path, page_size=page_size)
        found = await all_pages(self.registry.files[store, "ann"].ListFiles, request, "files")
        return [(file.name, file.size_bytes) for file in found]

    def staged(self) -> list[Path]:
        return list(self.folder.glob("*.state/staged-*"))


@pytest.fixture
async def desk(database_url: str, tmp_path: Path) -> AsyncIterator[Desk]:
    (tmp_path / "secret").write_text("private")
    files = tmp_path / "files"
    tools = file_tools(FileFolders(files, LIMITS, lambda: 0.0))
    async with running(database_url, tmp_path, tools, file_limits=LIMITS) as registry:
        yield Desk(registry, files)


async def _requests(path: str, pieces: Iterable[bytes]) -> AsyncIterator[file_pb2.PutFileRequest]:
    yield file_pb2.PutFileRequest(path=path)
    for piece in pieces:
        yield file_pb2.PutFileRequest(content=piece)


async def test_a_file_can_be_put_listed_read_by_the_model_and_downloaded(desk: Desk) -> None:
    put = await desk.put("/data/a.txt", [b"one ", b"", b"two"])
    assert (put.size_bytes, len(put.sha256)) == (7, 64)
    assert content(await desk.registry.run("read_file", {"path": "data/a.txt"}))["sha256"] == put.sha256
    assert (await desk.put("data/a.txt", [b"three"], user="bob")).size_bytes == 5
    assert await desk.get("/data/a.txt", user="vic") == b"three"
    await desk.put("empty", [])
    assert (await desk.listed(), await desk.listed("/data")) == ([("data", 0), ("empty", 0)], [("a.txt", 5)])
    for number in range(5):
        await desk.put(f"many/{number}", [])
    assert (await desk.listed("many", page_size=2), desk.staged()) == ([(str(number), 0) for number in range(5)], [])


async def test_files_belong_to_one_store(desk: Desk) -> None:
    """I13: the files of another store are never listed, read or replaced."""
    await desk.put("a", [b"of acme"])
    await desk.put("a", [b"of other"], store="other")
    assert (await desk.get("a"), await desk.get("a", store="other")) == (b"of acme", b"of other")
    await desk.put("b", [b"x"])
    assert await desk.listed(store="other") == [("a", 8)]
    for path in ("b", "../acme/b", "/../acme/b"):
        assert await refusal(desk.get(path, store="other")) in {"FILE_NOT_FOUND", "INVALID_FIELD"}


async def test_invalid_requests_are_refused_and_leave_nothing_behind(desk: Desk) -> None:
    await desk.put("folder/a", [b"a"])
    (desk.folder / "acme/link").symlink_to(desk.folder.parent / "secret")
    for path in ("", "/", "..", "../secret", "a/../b", "//a", "a\\b", "folder", "folder/a/b", "a/" * 20, "x\0y"):
        assert await refusal(desk.put(path, [b"x"])) == "INVALID_FIELD", path
    await raises(
        Exception,
        desk.put("folder", [b"x"]),
        match=r"path 'folder' is a folder\. Specify a file, such as 'folder/data.csv'",
    )
    assert await refusal(desk.put("link", [b"x"])) == "INVALID_FIELD"
    for path, reason in (
        ("", "INVALID_FIELD"),
        ("..", "INVALID_FIELD"),
        ("folder", "INVALID_FIELD"),
        ("link", "INVALID_FIELD"),
        ("no", "FILE_NOT_FOUND"),
        ("no/a", "FILE_NOT_FOUND"),
    ):
        assert await refusal(desk.get(path)) == reason, path
    assert await refusal(desk.listed("no")) == "FILE_NOT_FOUND"
    assert await refusal(desk.registry.files["acme", "ann"].PutFile(_nothing())) == "INVALID_FIELD"
    assert (desk.staged(), await desk.listed("folder")) == ([], [("a", 1)])
    assert (desk.folder.parent / "secret").read_text() == "private"


async def _nothing() -> AsyncIterator[file_pb2.PutFileRequest]:
    for request in list[file_pb2.PutFileRequest]():
        yield request


async def test_a_quota_reached_midway_refuses_the_new_file_and_keeps_the_old_one(desk: Desk) -> None:
    await desk.put("old", [b"o" * 50_000])
    assert await refusal(desk.put("new", [b"x" * 10_000] * 1000)) == "TOO_LARGE"
    assert await refusal(desk.put("old", [b"n" * 10_000] * 9)) == "TOO_LARGE"
    assert await desk.get("old") == b"o" * 50_000
    # A replaced file does not count.
    assert (await desk.put("old", [b"n" * 10_000] * 8)).size_bytes == 80_000
    assert (desk.staged(), await desk.listed()) == ([], [("old", 80_000)])


async def test_interrupted_upload_leaves_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.put("a", [b"old"])
    hangs = asyncio.Event()

    async def requests() -> AsyncIterator[file_pb2.PutFileRequest]:
        yield file_pb2.PutFileRequest(path="a", content=b"new")
        await hangs.wait()

    call = desk.registry.files["acme", "ann"].PutFile(requests())
    while not desk.staged():
        await asyncio.sleep(0.01)
    call.cancel()
    while desk.staged():
        await asyncio.sleep(0.01)
    monkeypatch.setattr(rpc, "IDLE_SECONDS", 0.05)
    assert await refusal(desk.registry.files["acme", "ann"].PutFile(requests())) == "DEADLINE_EXCEEDED"
    hangs.set()
    assert (desk.staged(), await desk.get("a")) == ([], b"old")


def test_uploads_of_a_dead_process_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    files = FileFolders(tmp_path, FileLimits(), lambda: 1e9)
    never = lambda _: False  # noqa: E731
    with files.staged(StoreId("acme"), "alive", "a", never) as file:
        file.write(b"x")
        (tmp_path / "acme.state/staged-put-dead").write_bytes(b"x" * 1000)
        files.delete_interrupted()
        assert [path.name for path in tmp_path.glob("*/staged-*")] == ["staged-put-alive"]
    assert list(tmp_path.glob("*/staged-*")) == []


async def test_a_file_that_is_replaced_during_a_download_is_still_downloaded_whole(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "PIECE_BYTES", 10_000)
    await desk.put("a", [b"o" * 70_000])
    stream = aiter(desk.registry.files["acme", "ann"].GetFile(file_pb2.GetFileRequest(path="a")))
    got = [await anext(stream), await anext(stream)]
    await desk.put("a", [b"new"])
    got += [response async for response in stream]
    assert b"".join(response.content for response in got) == b"o" * 70_000


async def test_large_files_take_bounded_memory(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    piece, count = os.urandom(MIB), 64
    async with running(database_url, tmp_path) as registry:
        desk = Desk(registry, tmp_path / "files")
        tracemalloc.start()
        try:
            await desk.put("big", (piece for _ in range(count)))
            size = 0
            async for response in registry.files["acme", "ann"].GetFile(file_pb2.GetFileRequest(path="big")):
                size += len(response.content)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size == count * MIB
    assert peak < 24 * MIB
