"""The client for programs that do not use asyncio. A thread with an event loop runs the asyncio client."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from pawl.chassis.process.tasks import end
from pawl.client.client import AsyncClient
from pawl.client.jobs import JobHandle
from pawl.client.session import AsyncSession
from pawl.client.workflows import WorkflowRun
from pawl.errors import PawlError

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")

_OVER: Final = object()


class LoopThread:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle)
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="pawl-client", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[R]]) -> R:
        """Run `work` in the loop and return its result. Interrupts such as Ctrl-C cancel the work.

        Raises:
            RuntimeError: The client is closed, or the caller is already in the loop's thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("an async callback cannot call the blocking client: use a function that is not async")
        future = self.begin(work)
        if future is None:
            raise RuntimeError("the client is closed")
        try:
            return future.result()
        except PawlError as error:
            raise error.with_traceback(None) from None  # The traceback through the thread is noise.
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Callable[[], Awaitable[R]]) -> Future[R] | None:
        """Schedule `work` in the loop and return its future. Return None if the loop is closed."""
        with self._lock:
            return None if self._is_closed else asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)

    def close(self, last: Callable[[], Awaitable[object]]) -> None:
        """Cancel running work, await `last` and stop the thread. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_all(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # For an event in one event loop, gRPC wakes all loops in the process; the others find nothing to read.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


async def _end_all(last: Callable[[], Awaitable[object]]) -> None:
    await end(asyncio.all_tasks() - {asyncio.current_task()})
    await asyncio.get_running_loop().shutdown_asyncgens()
    await last()


async def _awaited(work: Callable[[], Awaitable[R]]) -> R:
    return await work()


def _of(client: Any, found: R) -> R:
    """Attach this blocking client to a returned job, so that the job's methods block too."""
    if isinstance(found, JobHandle):
        found.client = client
    return found


def _plain(method: Callable[Concatenate[A, P], Awaitable[R]]) -> Callable[Concatenate[Any, P], R]:
    """Return a blocking version of a method."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = self._thread.run(lambda: method(self._asyncio, *args, **kwargs))
        return _of(self, found)

    functools.update_wrapper(call, method)
    return call


def _iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Return a blocking version of an async generator method."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        items, turn = method(self._asyncio, *args, **kwargs), asyncio.Lock()

        async def following() -> Any:
            async with turn:
                return await anext(items, _OVER)

        async def close() -> None:
            async with turn:  # Wait for an interrupted step.
                await items.aclose()

        try:
            while (item := self._thread.run(following)) is not _OVER:
                yield _of(self, item)
        finally:
            self._thread.begin(close)

    functools.update_wrapper(call, method)
    return call


def _as(
    _original: Callable[Concatenate[A, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Tell type checkers that a method has the same parameters as another method."""
    return lambda method: method


class SyncSession:
    """A blocking front-end session. See `AsyncSession`."""

    def __init__(self, thread: LoopThread, session: AsyncSession) -> None:
        self._thread = thread
        self._asyncio = session

    def __enter__(self) -> Self:
        self._thread.run(self._asyncio.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._asyncio.__aexit__)

    __iter__ = _iterating(AsyncSession.__aiter__)
    next_frame = _plain(AsyncSession.next_frame)
    start = _plain(AsyncSession.start)
    attach = _plain(AsyncSession.attach)
    decide = _plain(AsyncSession.decide)
    cancel = _plain(AsyncSession.cancel)


class SyncWorkflowRun:
    """A blocking handle for a workflow run. See `WorkflowRun`."""

    def __init__(self, thread: LoopThread, run: WorkflowRun) -> None:
        self._thread = thread
        self._asyncio = run
        self.run_id = run.run_id

    execution = _plain(WorkflowRun.execution)
    follow = _iterating(WorkflowRun.follow)
    result = _plain(WorkflowRun.result)
    pause = _plain(WorkflowRun.pause)
    resume = _plain(WorkflowRun.resume)
    send_event = _plain(WorkflowRun.send_event)
    rerun_plan = _plain(WorkflowRun.rerun_plan)

    @_as(WorkflowRun.rerun)
    def rerun(self, *args: Any, **options: Any) -> SyncWorkflowRun:
        """Run the workflow again from a node, once the run has ended. Return the new run."""
        return SyncWorkflowRun(self._thread, self._thread.run(lambda: self._asyncio.rerun(*args, **options)))


class Client:
    """The blocking client for a suite, with the same parameters and methods as `AsyncClient`.

    A context manager. Thread-safe.
    """

    @_as(AsyncClient.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._asyncio = AsyncClient(*args, **options)
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel everything that is still running and close the connections. Idempotent."""
        self._thread.close(self._asyncio.__aexit__)

    whoami = _plain(AsyncClient.whoami)
    usage = _iterating(AsyncClient.usage)
    start = _plain(AsyncClient.start)
    send = _plain(AsyncClient.send)
    cancel = _plain(AsyncClient.cancel)
    top_up = _plain(AsyncClient.top_up)
    get = _plain(AsyncClient.get)
    result = _plain(AsyncClient.result)
    watch = _iterating(AsyncClient.watch)
    text = _iterating(AsyncClient.text)
    runs = _iterating(AsyncClient.runs)
    calls = _iterating(AsyncClient.calls)
    round = _plain(AsyncClient.round)
    messages = _iterating(AsyncClient.messages)
    share = _plain(AsyncClient.share)
    erase = _plain(AsyncClient.erase)
    left_calls = _iterating(AsyncClient.left_calls)
    list_conversations = _iterating(AsyncClient.list_conversations)
    get_conversation = _plain(AsyncClient.get_conversation)
    update_conversation = _plain(AsyncClient.update_conversation)
    fork = _plain(AsyncClient.fork)
    import_conversation = _plain(AsyncClient.import_conversation)
    export_conversation = _plain(AsyncClient.export_conversation)
    pending = _iterating(AsyncClient.pending)
    watch_pending = _iterating(AsyncClient.watch_pending)
    decide = _plain(AsyncClient.decide)
    decide_all = _plain(AsyncClient.decide_all)
    submit = _plain(AsyncClient.submit)
    list_jobs = _iterating(AsyncClient.list_jobs)
    start_job = _plain(AsyncClient.start_job)
    get_job = _plain(AsyncClient.get_job)
    stop_job = _plain(AsyncClient.stop_job)
    pause_job = _plain(AsyncClient.pause_job)
    resume_job = _plain(AsyncClient.resume_job)
    stop_jobs = _plain(AsyncClient.stop_jobs)
    start_goal = _plain(AsyncClient.start_goal)
    get_goal = _plain(AsyncClient.get_goal)
    list_goals = _iterating(AsyncClient.list_goals)
    raise_goal = _plain(AsyncClient.raise_goal)
    complete_call = _plain(AsyncClient.complete_call)
    follow = _iterating(AsyncClient.follow)
    create_schedule = _plain(AsyncClient.create_schedule)
    update_schedule = _plain(AsyncClient.update_schedule)
    get_schedule = _plain(AsyncClient.get_schedule)
    list_schedules = _plain(AsyncClient.list_schedules)
    pause_schedule = _plain(AsyncClient.pause_schedule)
    resume_schedule = _plain(AsyncClient.resume_schedule)
    trigger_schedule = _plain(AsyncClient.trigger_schedule)
    backfill_schedule = _plain(AsyncClient.backfill_schedule)
    delete_schedule = _plain(AsyncClient.delete_schedule)
    create_trigger = _plain(AsyncClient.create_trigger)
    update_trigger = _plain(AsyncClient.update_trigger)
    get_trigger = _plain(AsyncClient.get_trigger)
    list_triggers = _plain(AsyncClient.list_triggers)
    pause_trigger = _plain(AsyncClient.pause_trigger)
    resume_trigger = _plain(AsyncClient.resume_trigger)
    rotate_trigger_secret = _plain(AsyncClient.rotate_trigger_secret)
    delete_trigger = _plain(AsyncClient.delete_trigger)
    deliver_webhook = _plain(AsyncClient.deliver_webhook)
    save_workflow = _plain(AsyncClient.save_workflow)
    get_workflow = _plain(AsyncClient.get_workflow)
    list_workflows = _iterating(AsyncClient.list_workflows)
    delete_workflow = _plain(AsyncClient.delete_workflow)
    documents = _iterating(AsyncClient.documents)
    get_document = _plain(AsyncClient.get_document)
    put_document = _plain(AsyncClient.put_document)
    upload = _plain(AsyncClient.upload)
    delete_document = _plain(AsyncClient.delete_document)

    @_as(AsyncClient.session)
    def session(self, **options: Any) -> SyncSession:
        """Return a blocking front-end session, which is a context manager. See `AsyncSession`."""
        return SyncSession(self._thread, self._asyncio.session(**options))

    @_as(AsyncClient.start_workflow)
    def start_workflow(self, *args: Any, **options: Any) -> SyncWorkflowRun:
        """Start a workflow, and return its run once the run is durable. See `AsyncClient.start_workflow`."""
        return SyncWorkflowRun(self._thread, self._thread.run(lambda: self._asyncio.start_workflow(*args, **options)))

    def workflow_run(self, run_id: str) -> SyncWorkflowRun:
        """Return a handle for a workflow run. This does not send a request."""
        return SyncWorkflowRun(self._thread, self._asyncio.workflow_run(run_id))
