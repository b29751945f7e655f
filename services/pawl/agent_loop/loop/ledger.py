from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from msgspec.structs import replace

from pawl.agent.v1.agent_pb2 import ListCallsRequest
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.histories import Histories, LoadedHistory, history_of
from pawl.agent_loop.loop.ports import Claim, Loaded, Renewal
from pawl.agent_loop.loop.rules import jobs, loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import TopUp
from pawl.agent_loop.loop.rules.run import Notice
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.step import Step, with_shared_budget
from pawl.chassis.identity.auth import Principal, for_user
from pawl.chassis.ids import CallId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.chassis.rpc.client import translated, translating
from pawl.chassis.rpc.translate import Exceptions, seconds
from pawl.event.v1 import call_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc

# Large enough for a step with the largest possible results of a whole batch.
LEDGER_MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024

# Timeout for streamed responses. Loading a large conversation takes a while.
_PARTS_SECONDS_MAX: Final = 60.0
_CALLS_PER_PAGE: Final = 200

_CLAIM: Final = wire.WIRE.struct(Claim, pb.ClaimedRun, Exceptions(of_message=("loaded", "conversation_id")))
_NOTICE: Final = wire.WIRE.struct(Notice, pb.Notice)
_STEP: Final = wire.WIRE.struct(
    Step,
    pb.CommitRunRequest,
    Exceptions(
        read={
            "events": lambda message: tuple(map(wire.EVENT.read, message.events)),
            "entered_notices": lambda _: (),
        },
        write={
            "events": lambda step: map(wire.EVENT.fields, step.events),
            "entered_notices": lambda step: [
                pb.EnteredNotice(run_id=each.run.run_id, occasion=each.occasion) for each in step.entered_notices
            ],
        },
        of_message=("store_id", "run_id", "epoch", "commit_id", "in_background"),
    ),
)


class WorkerLedgerClient:
    """A worker's client for job-store.

    It does not retry. Every method may raise DependencyUnavailable and can be retried.
    """

    def __init__(self, channel: grpc.aio.Channel, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.channel = channel
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._histories = Histories(monotonic)

    async def claim(
        self,
        worker_id: WorkerId,
        *,
        runs_max: int,
        lease_seconds: float,
        background_runs_max: int = 64,
        is_idle: bool = False,
    ) -> tuple[dict[Claim, Loaded | None], float | None]:
        """Claim due runs. Return each claim with the run's state, or with None if `load` must fetch the state.

        The worker holds at most `background_runs_max` background runs (jobs, and runs that jobs started). If `is_idle`
        is true and no run was claimed, the second value is `ClaimRunsResponse.wait_seconds`, or None if that field is
        absent.
        """
        request = pb.ClaimRunsRequest(
            worker_id=worker_id,
            runs_max=runs_max,
            lease_seconds=lease_seconds,
            background_runs_max=background_runs_max,
            idle=is_idle,
        )
        self._histories.forget_idle()
        response = await translated(self._stub.ClaimRuns(request))
        for run in response.runs:
            self._histories.claimed(run)
        wait_seconds = response.wait_seconds if response.HasField("wait_seconds") else None
        return {_CLAIM.read(run): _came_along(run) for run in response.runs}, wait_seconds

    async def load(self, claim: Claim) -> Loaded:
        """Load the full state of a claimed run.

        Raises:
            LeaseLost, RunNotFound: The run does not belong to this worker.
        """
        known = self._histories.of(claim.key)
        request = pb.LoadRunRequest(**_fence(claim), known=known.prefix if known else None)
        response = await _load(self._stub, request)
        return _loaded(response, self._histories.taken(response, known))

    async def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewal:
        self._histories.forget_idle()
        request = pb.RenewLeasesRequest(worker_id=worker_id, lease_seconds=lease_seconds)
        response = await translated(self._stub.RenewLeases(request))
        return Renewal(
            held=tuple(map(_CLAIM.read, response.runs)),
            with_commands=tuple(map(_CLAIM.read, response.runs_with_commands)),
        )

    async def release(self, worker_id: WorkerId) -> None:
        """Release all of the worker's runs. Idempotent."""
        await translated(self._stub.ReleaseWorker(pb.ReleaseWorkerRequest(worker_id=worker_id)))

    async def report_crash(self, claim: Claim) -> bool:
        """Release a run that this worker can neither drive nor end. Return whether the ledger quarantined the run.

        Raises:
            LeaseLost, RunEnded, RunNotFound: The run no longer belongs to this worker.
        """
        request = pb.ReportCrashRequest(**_fence(claim))
        response = await translated(self._stub.ReportCrash(request))
        return response.quarantined

    async def commit(self, claim: Claim, commit_id: str, step: Step) -> pb.CommitRunResponse:
        """Write one step. Idempotent by commit id.

        Raises:
            LeaseLost, RunEnded, RunNotFound: The run no longer belongs to this worker.
            InboxChanged, IllegalTransition: Nothing was written. Reload and plan again.
        """
        request = pb.CommitRunRequest(
            **_fence(claim), commit_id=commit_id, in_background=claim.in_background, **_STEP.fields(step)
        )
        return await translated(self._stub.CommitRun(request))

    async def read_inbox(self, claim: Claim, state: State) -> State:
        request = pb.ListCommandsRequest(store_id=claim.key.store_id, run_id=claim.key.run_id)
        response = pb.ListCommandsResponse()
        with translating():
            async for part in self._stub.ListCommands(request, timeout=_PARTS_SECONDS_MAX):
                response.MergeFrom(part)
        return _with_inbox(state, response)

    async def call(self, store_id: StoreId, user_id: UserId, call_id: CallId) -> Call:
        """Return a call from any of the user's runs.

        Raises:
            CallNotFound
        """
        request = pb.GetCallRequest(store_id=store_id, user_id=user_id, call_id=call_id)
        response = await translated(self._stub.GetCall(request))
        return wire.CALL.read(response.call)


async def load_at(channel: grpc.aio.Channel, run: RunKey, last_number: int) -> tuple[Loaded, Sequence[call_pb2.Call]]:
    """Return any user's run, with its history as it was after message `last_number` of the conversation.

    Also return the calls of the run and of the history.

    Raises:
        RunNotFound
    """
    request = pb.LoadRunRequest(store_id=run.store_id, run_id=run.run_id, last_number=last_number)
    response = await _load(ledger_pb2_grpc.LedgerServiceStub(channel), request)
    return _loaded(response, history_of(response)), response.calls


async def _load(stub: ledger_pb2_grpc.LedgerServiceAsyncStub, request: pb.LoadRunRequest) -> pb.LoadRunResponse:
    response = pb.LoadRunResponse()
    with translating():
        async for part in stub.LoadRun(request, timeout=_PARTS_SECONDS_MAX):
            response.MergeFrom(part)
    return response


async def calls_of_run(
    channel: grpc.aio.Channel,
    store_id: StoreId,
    user_id: UserId,
    run_id: RunId,
    keep: Callable[[Call], Call] = lambda call: call,
) -> list[Call]:
    """Return all calls of one of the user's runs, in order. `keep` selects the fields of each call.

    Raises:
        RunNotFound
    """
    request, calls = ListCallsRequest(run_id=run_id, page_size=_CALLS_PER_PAGE), list[Call]()
    named = for_user(Principal(store_id=store_id, user_id=user_id))
    while True:
        page = await translated(AgentServiceStub(channel).ListCalls(request, metadata=named))
        calls += (keep(wire.CALL.read(call)) for call in page.calls)
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return calls


def _fence(claim: Claim) -> dict[str, Any]:
    """Return the request fields by which the ledger recognises an outdated claim."""
    return {"store_id": claim.key.store_id, "run_id": claim.key.run_id, "epoch": claim.epoch}


def _came_along(run: pb.ClaimedRun) -> Loaded | None:
    """Return the state that was sent with a claim, or None if it was not sent or is unreadable."""
    if not run.HasField("loaded"):
        return None
    try:
        return _loaded(run.loaded, history_of(run.loaded))
    except Exception:  # noqa: BLE001  # the other runs are already claimed
        return None


def _loaded(response: pb.LoadRunResponse, history: LoadedHistory) -> Loaded:
    run = State(
        run=jobs.as_driven(wire.RUN.read(response.run)),
        messages=history.messages,
        calls=history.calls,
        loop=loop_state.read(response.loop_state),
    )
    state, left = _with_inbox(run, response), None
    if response.HasField("shared_tokens_left"):
        # The ledger has counted top-ups that the run has not applied yet.
        unread = sum(command.kind.tokens for command in state.commands if isinstance(command.kind, TopUp))
        left = response.shared_tokens_left - unread
    own_tools = tuple(map(wire.OWN_TOOL.read, response.own_tools))
    return Loaded(state=with_shared_budget(state, left), now=seconds(response.now), own_tools=own_tools)


def _with_inbox(state: State, response: pb.LoadRunResponse | pb.ListCommandsResponse) -> State:
    return replace(
        state,
        commands=tuple(map(wire.COMMAND.read, response.commands)),
        notices=tuple(map(_NOTICE.read, response.notices)),
        open_jobs=response.open_job_count,
        jobs_below=response.jobs_below_count,
    )
