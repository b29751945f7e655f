"""Models that stop jobs with `stop_job`, and checkers of stopped jobs (ASYNC-5, ASYNC-6)."""

from __future__ import annotations

from collections.abc import Iterator

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import PawlError
from pawl.event.v1 import run_pb2
from tests.simulation.history import Sent
from tests.simulation.network import Network
from tests.simulation.record import Record, run_state
from tests.simulation.world import World


class StoppingModels:
    """Stops a user's jobs either as the model of the run that started them, or as a model of their conversation."""

    def __init__(self, world: World, store_id: StoreId, name: str, network: Network) -> None:
        self._world = world
        self._store_id = store_id
        self._name = name
        self._network = network
        self._draw = world.chance.stream("stops", name)
        self._count = 0

    async def consider(self, job: run_pb2.Run) -> None:
        if self._draw.random() > 0.05 or not job.parent_run_id:
            return
        self._count += 1
        starter = self._world.tables.runs[RunKey(self._store_id, RunId(job.parent_run_id))]
        is_starter = self._draw.random() < 0.4
        conversation_id = starter.conversation_id if is_starter else ConversationId(job.reports_to_conversation_id)
        caller_id = starter.run_id if is_starter or not job.above else RunId(job.above[0].run_id)
        command_id = CommandId(f"stop_{self._name}_{self._count}")
        sent = Sent(
            user_id=self._name, command_id=command_id, run_id=job.run_id, kind="CANCEL", content=caller_id.encode()
        )
        self._world.history.commands.append(sent)
        key = RunKey(self._store_id, RunId(job.run_id))
        try:
            found = await self._world.insist(
                self._network,
                self._draw,
                "stop_job",
                lambda agent: agent.reads.stop_job(key, UserId(self._name), conversation_id, caller_id, command_id),
            )
        except PawlError as error:
            sent.outcomes.append(error.reason)
        else:
            sent.outcomes.append("ACCEPTED" if found is not None and found[1] else "LATE")


def stops_reach_the_jobs_below(record: Record) -> Iterator[str]:
    """ASYNC-6: if a job is stopped, the jobs that its delegated runs started are stopped too."""
    for job in record.runs.values():
        starter = record.runs.get(job.parent_run_id) if job.reports_to_conversation_id else None
        if starter is None or starter.stop_cause != run_pb2.STOP_CAUSE_PARENT or not _is_below_job(record, starter):
            continue
        is_open = run_state(job.state) not in {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}
        ended_at = record.written_at(job.run_id, job.last_seq)
        if not job.stop_cause and (is_open or ended_at > _stopped_at(record, starter)):
            yield f"job {job.run_id} continued after {starter.run_id}, which had started it, was stopped"


def stops_are_reported_to_others(record: Record) -> Iterator[str]:
    """ASYNC-5: the end of a job is not reported to the model that stopped it, but to any other receiver."""
    for sent in record.history.commands:
        job = record.runs.get(sent.run_id)
        is_quiet = job is not None and job.stop_cause == run_pb2.STOP_CAUSE_MODEL
        if job is None or not (sent.command_id.startswith("stop_") and sent.taken and is_quiet):
            continue
        stopped_at, above = _stopped_at(record, job), job
        while above.parent_run_id:
            above = record.runs[above.parent_run_id]
            is_agent = above.parent_run_id and not above.reports_to_conversation_id
            if is_agent and record.written_at(above.run_id, above.last_seq) > stopped_at:
                if above.run_id != sent.content.decode():
                    yield f"{sent.content.decode()} stopped {job.run_id}, which is not reported to {above.run_id}"
                break


def _is_below_job(record: Record, run: run_pb2.Run) -> bool:
    while run.parent_run_id:
        run = record.runs[run.parent_run_id]
        if run.reports_to_conversation_id:
            return True
    return False


def _stopped_at(record: Record, run: run_pb2.Run) -> float:
    stops = (
        event.seq
        for event in record.logs[run.run_id]
        if run_state(event.run_changed.run.state) in {"CANCELLING", "CANCELLED"}
    )
    return record.written_at(run.run_id, next(stops))


CHECKERS = (stops_reach_the_jobs_below, stops_are_reported_to_others)
