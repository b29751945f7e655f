"""Implements pawl.tool.v1.FileService. The store comes from the caller's credential."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import IdSource
from pawl.chassis.process.tasks import uncancelled
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import timestamp
from pawl.errors import DeadlineExceeded, FileNotFound, InvalidField, TooLarge
from pawl.tool.v1 import file_pb2 as pb
from pawl.tool.v1 import file_pb2_grpc
from pawl.tool_registry.builtin.files.folders import FileFolders, FileView
from pawl.tool_registry.builtin.files.handles import FileMissing, OverLimit
from pawl.tool_registry.builtin.files.rules import Entry, FileChange, Planned
from pawl.tool_registry.builtin.files.staging import StagedFile
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tools.sdk.context import ToolError

PIECE_BYTES: Final = 512 * 1024
IDLE_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 30.0

T = TypeVar("T")


class FileServicer(file_pb2_grpc.FileServiceServicer):
    def __init__(self, files: FileFolders, ids: IdSource) -> None:
        self._files = files
        self._ids = ids

    async def PutFile(self, requests: AsyncIterator[pb.PutFileRequest], context: Context) -> pb.PutFileResponse:
        try:
            return await self._put(requests)
        except (FileNotFound, InvalidField, TooLarge):
            # A grpc.aio client that is still sending would report INTERNAL instead of the reason.
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    async for _ in requests:
                        pass
            raise

    async def _put(self, requests: AsyncIterator[pb.PutFileRequest]) -> pb.PutFileResponse:
        store_id, key, never = require_user().store_id, self._ids.new("put"), threading.Event().wait
        first = await _next(requests)
        path, digest, stack = _path(first.path) if first else "", hashlib.sha256(), ExitStack()
        try:
            with _errors():
                file = await _in_thread(stack.enter_context, self._files.staged(store_id, key, path, never))
                request = first
                while request is not None:
                    digest.update(request.content)
                    await _in_thread(file.write, request.content)
                    request = await _next(requests)
                await _in_thread(file.sync)
                await _in_thread(self._files.change, store_id, key, partial(_plan, path, file), never)
            return pb.PutFileResponse(size_bytes=file.size, sha256=digest.hexdigest())
        finally:
            await _in_thread(stack.close)

    async def GetFile(self, request: pb.GetFileRequest, context: Context) -> AsyncIterator[pb.GetFileResponse]:
        with ExitStack() as stack:
            with _errors():
                opened = self._files.opened(require_user().store_id, _path(request.path))
                handle = await _in_thread(stack.enter_context, opened)
            yield pb.GetFileResponse(size_bytes=os.fstat(handle).st_size)
            while piece := await _in_thread(os.read, handle, PIECE_BYTES):
                yield pb.GetFileResponse(content=piece)

    async def ListFiles(self, request: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        size, (after,) = page_size(request.page_size), position_of("files", request.page_token, tuple[str]) or ("",)
        with _errors():
            entries = await _in_thread(self._files.entries, require_user().store_id, _path(request.path))
        page, token = cut(
            [entry for entry in entries if entry.name > after], size, lambda last: page_token("files", last.name)
        )
        return pb.ListFilesResponse(files=map(_file, page), next_page_token=token)


def _plan(path: str, file: StagedFile, view: FileView) -> Planned:
    old = view.entry(path)
    if old is not None and old.kind == "folder":
        raise ToolError(f"path {path!r} is a folder. Specify a file, such as {f'{path}/data.csv'!r}")
    if old is not None and old.kind != "file":
        raise ToolError(f"path {path!r} is not a regular file")
    change = FileChange(kind="put", path=path, staged=file.name, staged_bytes=file.size)
    return Planned(change=change, outcome=b"")


async def _next(requests: AsyncIterator[pb.PutFileRequest]) -> pb.PutFileRequest | None:
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no message arrived for {IDLE_SECONDS:g} s") from None


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a blocking function in a thread.

    If the caller is cancelled, wait for the function to return before raising CancelledError.
    """
    return await uncancelled(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


def _path(path: str) -> str:
    return path.removeprefix("/")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FileMissing as error:
        raise FileNotFound(str(error)) from None
    except OverLimit as error:
        raise TooLarge(str(error)) from None
    except ToolError as error:
        raise InvalidField(str(error), field="path") from None


def _file(entry: Entry) -> pb.File:
    update_time: Any = timestamp(entry.modified)
    kind = pb.FileKind.Value(f"FILE_KIND_{entry.kind.upper()}")
    return pb.File(name=entry.name, kind=kind, size_bytes=entry.size_bytes, update_time=update_time)
