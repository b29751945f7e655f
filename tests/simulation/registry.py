"""A tool registry that keeps the promises of docs/guides/tools.md, crashes during effects and counts them.

Its journal survives a crash, like the database of the real registry. The real registry's rule decides about retries.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.jobs import draft
from pawl.agent_loop.loop.rules.proposals import to_check
from pawl.agent_loop.loop.rules.run import PinnedTool, Run
from pawl.agent_loop.loop.rules.tool import (
    ExecutionPiece,
    ExecutionResult,
    ProposedCall,
    RecordedDecision,
    RecordedResult,
    Resolved,
    Stopped,
    Tool,
    Verdict,
)
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, RunId, StoreId
from pawl.chassis.process.tasks import shield
from pawl.errors import ApprovalRequired, DependencyUnavailable, InvalidArguments, ToolNotFound
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.workflow_pb2 import WorkflowVersion
from pawl.job.v1.ledger_pb2 import GetRunResponse
from pawl.tool_registry.rules import execution as recorded
from pawl.tool_registry.rules.journal import Entry, Step, next_step
from pawl.tool_registry.rules.verdict import grant_digest
from pawl.values import (
    REPEATABLE,
    Disposition,
    EffectClass,
    Execution,
    OfferFallback,
    Outcome,
    Progress,
    Question,
    ReadTimeouts,
    Series,
)
from tests.fakes.registry import FakeChecker, tool
from tests.simulation.chance import Chance
from tests.simulation.history import Effect, History
from tests.simulation.network import DEADLINE_SECONDS, Network
from tests.simulation.process import Process

T = TypeVar("T")

TOOLS: dict[str, Verdict] = {
    "look": tool(effect="READ_ONLY", parallel=True),
    "note": tool(effect="IDEMPOTENT"),
    "pay": tool(effect="AT_MOST_ONCE", parallel=True),
    "book": tool(effect="RECONCILABLE"),
    "mail": tool("APPROVE", effect="AT_MOST_ONCE"),
    "show": tool("OFFER", context="FRONTEND"),
    "draw": tool(
        "OFFER",
        context="FRONTEND",
        offer_fallback=OfferFallback.BACKEND_TOOL,
        fallback_tool_name="note",
    ),
    "pick": tool("OFFER", context="FRONTEND", offer_fallback=OfferFallback.ASK_USER, question=Question(question="?")),
    "run_agent": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which colour?")),
}

FRONT_END = ("show", "draw", "pick")
# A front-end tool that is not registered: it comes with runs.
OWN = "sketch"
BACK_END = ("look", "note", "pay", "book", "mail")


def effect_class(name: str) -> EffectClass:
    # Workflows also make calls without a tool: events, questions and child runs.
    return (TOOLS[name].effect_class or EffectClass.AT_MOST_ONCE) if name in TOOLS else EffectClass.READ_ONLY


# How long a dead process still owns its open entries.
LEASE_SECONDS = 4.0

_SCHEMA = b'{"type":"object","properties":{"n":{"type":"integer"}}}'
# Reads that end within this time return their result with the verdict.
_MOMENT_SECONDS = 0.3
# How late an iteration may start if it was due before the end of its series.
_LATE_SECONDS = 60.0
# Some jobs of delegated runs end in the instant of that run's end or next step.
_TOGETHER = 0.5
_NEXT_STEP = 0.3
_OFFERED = tool("OFFER", context="FRONTEND")
OUTCOMES = ("done", "done again")
_NULL = CallResult(content_json=b"null")
_UNKNOWN = ExecutionResult(outcome=Outcome.UNKNOWN, result=_NULL)


@dataclass(slots=True)
class _Entry:
    server: Server | None
    effect: EffectClass
    unknowns: int = 0
    result: ExecutionResult | None = None


@dataclass
class Journal:
    chance: Chance
    history: History
    entries: dict[str, _Entry] = field(default_factory=dict)
    # Calls started under each grant.
    grants: dict[str, set[str]] = field(default_factory=dict)
    # The current version of the gated tools.
    version: int = 1
    # True while a rule requires approval of each call of the gated tools.
    requires_approval: bool = False
    # The end of the log of an open run, by its id; None for other runs.
    progress_of: Callable[[str], int | None] = lambda _: None


def _error(reason: str, outcome: Outcome = Outcome.FAILED) -> ExecutionResult:
    content = msgspec.json.encode({"error": reason.lower()})
    return ExecutionResult(outcome=outcome, result=CallResult(content_json=content, is_error=True, error_reason=reason))


class Server:
    def __init__(self, process: Process, journal: Journal) -> None:
        self.process = process
        self._journal = journal
        self._draw = journal.chance.stream("registry", process.name)
        self._running: dict[str, asyncio.Task[ExecutionResult]] = {}
        self.died_at: float | None = None

    @property
    def version(self) -> int:
        return self._journal.version

    @property
    def requires_approval(self) -> bool:
        return self._journal.requires_approval

    async def resolve(self, names: Sequence[str]) -> Resolved:
        for name in names:
            if name not in TOOLS:
                raise ToolNotFound(tool_name=name)
        tools = tuple(
            Tool(
                name=name,
                version=1,
                description=name,
                arguments_schema_json=_SCHEMA,
                fallback_tool_name=TOOLS[name].fallback_tool_name,
                context=TOOLS[name].context,
            )
            for name in (names or TOOLS)
        )
        return Resolved(tools=tools)

    async def check(
        self, context: CallContext, calls: Sequence[ProposedCall], reads: ReadTimeouts | None
    ) -> tuple[Verdict, ...]:
        verdicts = tuple(self._verdict(context, call) for call in calls)
        not_refused = [verdict for verdict in verdicts if verdict.disposition is not Disposition.REFUSE]
        if reads is None or any(verdict.effect_class is not EffectClass.READ_ONLY for verdict in not_refused):
            return verdicts
        return tuple(
            [
                replace(verdict, result=await self._read(context, call)) if verdict in not_refused else verdict
                for verdict, call in zip(verdicts, calls, strict=True)
            ]
        )

    async def _read(self, context: CallContext, call: ProposedCall) -> ExecutionResult | None:
        """Run a read-only call and return its result, or None if it takes too long."""
        execution = Execution(
            call_id=call.call_id,
            tool_name=call.tool_name,
            tool_version=call.tool_version,
            arguments_json=call.arguments_json,
            earlier_attempts=0,
            unknowns_resolved=0,
            timeout_seconds=_MOMENT_SECONDS,
            approved_digest="",
            rule_id="",
        )
        ended = await self._perform(context, execution)
        return None if ended.result.error_reason == "TOOL_TIMEOUT" else ended

    async def record_decisions(self, decisions: Sequence[RecordedDecision]) -> None:
        self._journal.history.decided.update(
            (decision.call_id, decision.kind.name, decision.user_id) for decision in decisions
        )

    async def record_results(self, results: Sequence[RecordedResult]) -> None:
        self._journal.history.decided.update((result.call_id, result.state.name, result.user_id) for result in results)

    def _is_granted(self, series: Series, context: CallContext, call: Execution | ProposedCall) -> bool:
        """Return whether a grant covers exactly this call, and count each call once."""
        digest = _series_digest(series, context.run_id, call.tool_name, call.arguments_json, self.version)
        if series.digest != digest or self._journal.requires_approval or _is_over(series):
            return False
        used = self._journal.grants.setdefault(digest, set())
        if len(used | {call.call_id}) <= series.iterations_max:
            used.add(call.call_id)
        return call.call_id in used

    def _verdict(self, context: CallContext, call: ProposedCall) -> Verdict:
        verdict = TOOLS.get(call.tool_name) if call.own_tool is None else _OFFERED
        if verdict is None or b'"bad"' in call.arguments_json:
            reason = "TOOL_NOT_FOUND" if verdict is None else "INVALID_ARGUMENTS"
            said = "The call is not allowed."
            return Verdict(
                call_id=call.call_id, disposition=Disposition.REFUSE, error_reason=reason, error_message=said
            )
        is_gated, series = verdict.disposition is Disposition.APPROVE, call.series
        granted = ""
        if is_gated and series is not None and not self._journal.requires_approval:
            granted = _series_digest(series, context.run_id, call.tool_name, call.arguments_json, self.version)
            if self._is_granted(series, context, call):
                verdict = replace(verdict, disposition=Disposition.RUN)
        return replace(
            verdict,
            series_digest=granted,
            call_id=call.call_id,
            tool_version=call.tool_version or 1,
            arguments_json=call.arguments_json,
            digest=digest_of(context.store_id, call.call_id, call.tool_name, call.arguments_json) if is_gated else "",
        )

    async def execute(self, context: CallContext, execution: Execution) -> ExecutionResult:
        """Run a call, join its running execution, or return its journaled result."""
        verdict = TOOLS[execution.tool_name]
        if verdict.disposition is Disposition.APPROVE and execution.approved_digest != digest_of(
            context.store_id, execution.call_id, execution.tool_name, execution.arguments_json
        ):
            series = execution.series
            if series is None or not self._is_granted(series, context, execution):
                raise ApprovalRequired
        if verdict.effect_class in REPEATABLE:
            return await self._perform(context, execution)
        running = self._running.get(execution.call_id)
        if running is None:
            entry = self._journal.entries.get(execution.call_id)
            if entry is not None:
                known = self._known(execution, entry)
                if known is not None:
                    return known
            unknowns = entry.unknowns if entry else 0
            self._journal.entries[execution.call_id] = _Entry(
                self, verdict.effect_class or EffectClass.AT_MOST_ONCE, unknowns
            )
            running = self._running[execution.call_id] = asyncio.get_running_loop().create_task(
                self._record(context, execution)
            )
        return await shield(running)

    async def cancel(self, call_id: str, wait_seconds: float) -> Stopped:
        entry = self._journal.entries.setdefault(call_id, _Entry(None, EffectClass.AT_MOST_ONCE))
        if entry.server is None and entry.result is None:
            entry.result = _error("CANCELLED", Outcome.CANCELLED)
            return Stopped(stopped=True)
        running = self._running.get(call_id)
        if running is None:
            if entry.result is None and entry.server is not None and entry.server.holds():
                return Stopped(stopped=False)
            return Stopped(stopped=True, result=entry.result)
        running.cancel()
        await asyncio.wait([running], timeout=wait_seconds)
        return Stopped(stopped=running.done(), result=entry.result)

    def holds(self) -> bool:
        return self.died_at is None or asyncio.get_running_loop().time() < self.died_at + LEASE_SECONDS

    def _known(self, execution: Execution, entry: _Entry) -> ExecutionResult | None:
        """Return the journaled result, or None if the call must run."""
        effect = EffectClass[entry.effect.value]
        read = Entry(
            fingerprint="",
            effect=effect,
            unknowns=entry.unknowns,
            is_own=entry.server is self,
            is_unexecuted=False,
            is_holder_alive=entry.server is not None and entry.server.holds(),
            result=None if entry.result is None else _recorded(entry.result),
        )
        match next_step(read, fingerprint="", unknowns_resolved=execution.unknowns_resolved):
            case Step.RUN:
                return None
            case Step.STORED:
                return entry.result
            case Step.RECONCILE:
                happened = any(effect.call_id == execution.call_id for effect in self._journal.history.effects)
                if not happened:
                    return None
                entry.result = _result(execution)
                return entry.result
            case Step.CONCLUDE_UNKNOWN:
                entry.result, entry.unknowns = _UNKNOWN, entry.unknowns + 1
                return entry.result
            case _:
                raise DependencyUnavailable("another process runs the call")

    async def _record(self, context: CallContext, execution: Execution) -> ExecutionResult:
        entry = self._journal.entries[execution.call_id]
        try:
            entry.result = await self._perform(context, execution)
        except asyncio.CancelledError:
            entry.result = _error("CANCELLED", Outcome.CANCELLED)
        return entry.result

    async def _perform(self, context: CallContext, execution: Execution) -> ExecutionResult:
        draw, begin = self._draw, asyncio.get_running_loop().time()
        version, requires_approval = self.version, self.requires_approval
        seconds = draw.choice([0.01, 0.2, 1.0, 3.0]) * draw.random()
        fails = self._journal.chance.strikes(draw, "tool failed", 0.1)
        try:
            async with asyncio.timeout(execution.timeout_seconds or None):
                await asyncio.sleep(seconds * draw.random())
                if fails:
                    return _error("TOOL_ERROR")
                if TOOLS[execution.tool_name].effect_class is not EffectClass.READ_ONLY:
                    self._have_effect(
                        context, execution, begin=begin, version=version, requires_approval=requires_approval
                    )
                await asyncio.sleep(seconds * draw.random())
                if context.in_background and len(context.above) > 1 and draw.random() < _TOGETHER:
                    await self._end_with(context.above[-1].run_id, draw)
        except TimeoutError:
            return _error("TOOL_TIMEOUT")
        return _result(execution)

    async def _end_with(self, run_id: str, draw: random.Random) -> None:
        """Wait until the run that started a job ends, or takes its next step."""
        loop = asyncio.get_running_loop()
        end, is_next = loop.time() + 3.0, draw.random() < _NEXT_STEP
        first = self._journal.progress_of(run_id)
        while loop.time() < end and first is not None:
            now = self._journal.progress_of(run_id)
            if now is None or (is_next and now != first):
                return
            await asyncio.sleep(0.002)

    def _have_effect(
        self, context: CallContext, execution: Execution, *, begin: float, version: int, requires_approval: bool
    ) -> None:
        history = self._journal.history
        history.tell(f"effect {execution.tool_name} {execution.call_id}")
        history.effects.append(
            Effect(
                time=asyncio.get_running_loop().time(),
                call_id=execution.call_id,
                run_id=context.run_id,
                user_id=context.user_id,
                tool_name=execution.tool_name,
                arguments_json=execution.arguments_json,
                begin=begin,
                version=version,
                requires_approval=requires_approval,
                ruled_by=frozenset(
                    {context.run_id, context.conversation_id}
                    | {part for above in context.above for part in (above.run_id, above.conversation_id)}
                ),
            )
        )


def _recorded(result: ExecutionResult) -> recorded.ExecutionResult:
    return recorded.ExecutionResult(outcome=result.outcome, content=result.result.content_json)


def _result(execution: Execution) -> ExecutionResult:
    """Return one of two successful results that monitors can tell apart. It is the same for each attempt."""
    outcome = random.Random(execution.call_id).choice(OUTCOMES)  # the same outcome for each attempt
    content = msgspec.json.encode(f"{execution.tool_name} {outcome}")
    return ExecutionResult(outcome=Outcome.SUCCEEDED, result=CallResult(content_json=content))


def digest_of(store_id: str, call_id: str, tool_name: str, arguments_json: bytes) -> str:
    parts = (store_id, call_id, tool_name, arguments_json.decode())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _series_digest(series: Series, run_id: str, tool_name: str, arguments_json: bytes, version: int) -> str:
    """Return the digest that a grant covers, by the real registry's rule, at the current tool `version`."""
    said = Series(
        interval_seconds=series.interval_seconds, iterations_max=series.iterations_max, end_time=series.end_time
    )
    return grant_digest(
        said,
        store_id=StoreId("store"),
        run_id=RunId(run_id),
        tool_name=tool_name,
        tool_versions=(1, version),
        arguments=arguments_json,
    )


def _is_over(series: Series) -> bool:
    now = asyncio.get_running_loop().time()
    return series.end_time is not None and now > series.end_time + _LATE_SECONDS


class Client(FakeChecker):
    def __init__(self, network: Network, current: Sequence[Server]) -> None:
        super().__init__()
        self._network = network
        self._current = current

    async def _ask(
        self, what: str, work: Callable[[Server], Awaitable[T]], *, deadline_seconds: float | None = DEADLINE_SECONDS
    ) -> T:
        server = self._current[-1]
        return await self._network.call(server.process, what, lambda: work(server), deadline_seconds=deadline_seconds)

    async def resolve(
        self,
        context: CallContext,
        names: Sequence[str],
        pinned: Sequence[PinnedTool] = (),
        *,
        most: int = 0,
        skip_missing: bool = False,
    ) -> Resolved:
        return await self._ask("resolve", lambda server: server.resolve(names))

    async def check(
        self,
        context: CallContext,
        calls: Sequence[ProposedCall],
        known_tool_names: Sequence[str],
        reads: ReadTimeouts | None = None,
    ) -> tuple[Verdict, ...]:
        return await self._ask("check", lambda server: server.check(context, calls, reads))

    async def record_decisions(self, context: CallContext, decisions: Sequence[RecordedDecision]) -> None:
        await self._ask("record_decisions", lambda server: server.record_decisions(decisions))

    async def record_results(self, context: CallContext, results: Sequence[RecordedResult]) -> None:
        await self._ask("record_results", lambda server: server.record_results(results))

    async def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        if execution.call_id.endswith(("1", "5", "a")):
            yield Progress(fraction=0.5, message="half")
        yield await self._ask("execute", lambda server: server.execute(context, execution), deadline_seconds=None)

    async def cancel(self, context: CallContext, call_id: str, *, wait_seconds: float) -> Stopped:
        seconds = wait_seconds + 2
        return await self._ask("cancel", lambda server: server.cancel(call_id, wait_seconds), deadline_seconds=seconds)

    async def check_answer(self, store_id: str, answer_schema_json: bytes, answer: str) -> None:
        """Accept every answer, because the questions have no schema."""

    async def put_workflow_tool(self, store_id: StoreId, workflow: WorkflowVersion, *, validate_only: bool) -> None:
        """Accept every workflow. No agent calls one as a tool."""

    async def check_output(self, store_id: str, schema_json: bytes, output: str | None) -> OutputChecked:
        """Accept every output, because the runs have no output schema."""
        return OutputChecked(output_json=(output or "").encode())

    async def check_edit(
        self, read: GetRunResponse, call: Call, arguments_json: bytes, series: Series | None = None
    ) -> Verdict:
        run = read.run
        if b'"bad"' in arguments_json:
            raise InvalidArguments("not allowed")
        digest = digest_of(run.store_id, call.call_id, call.tool_name, arguments_json)
        granted = ""
        if series is not None and not self._current[-1].requires_approval:
            granted = _series_digest(series, run.run_id, call.tool_name, arguments_json, self._current[-1].version)
        return Verdict(
            call_id=CallId(call.call_id),
            disposition=Disposition.APPROVE,
            arguments_json=arguments_json,
            digest=digest,
            series_digest=granted,
        )

    async def check_job(self, caller: Principal, run: Run, now: float) -> Verdict:
        assert run.job is not None
        (verdict,) = await self.check(CallContext.of(run), to_check(run, [draft(run, run.job, now)]), ())
        return verdict

    async def count_tools(self, caller: Principal) -> int:
        return len((await self._ask("resolve", lambda server: server.resolve(()))).tools)
