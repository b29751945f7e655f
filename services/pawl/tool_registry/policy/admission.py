"""Admits calls: checks schemas, approvals, rules, grants, the journal and rate limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pawl.chassis.ids import CallId
from pawl.chassis.process import logs
from pawl.chassis.visible import shortened, visible
from pawl.errors import ApprovalRequired, InvalidArguments, PawlError, PermissionDenied, ToolNotFound
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.catalog.catalog import Catalog, CatalogTool
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.metrics import RegistryMetrics
from pawl.tool_registry.policy.call import ExecuteRequest, FittingCall, Job, Proposal, ProposedCall
from pawl.tool_registry.policy.result_cache import ResultCache
from pawl.tool_registry.policy.rules.gate import STORE_RATE_NAME, Exceeded, Rate, rate_limited
from pawl.tool_registry.policy.rules.patterns import TooMuchToMatch
from pawl.tool_registry.policy.rules.rules import Rule, RuleEffect, RuleScope
from pawl.tool_registry.policy.ruleset import Rules
from pawl.tool_registry.policy.store.grants import PostgresGrantUses
from pawl.tool_registry.policy.store.rates import PostgresRateLimits
from pawl.tool_registry.rules.check import Accepted, Refused
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.rules.journal import Begun, HeldElsewhere
from pawl.tool_registry.rules.verdict import CallContext, Verdict, question_of
from pawl.tool_registry.sources.python.runner import TakesTooLong
from pawl.tools.rules.resources import resource_keys
from pawl.tools.rules.schema import did_you_mean
from pawl.values import Disposition, EffectClass, ExecutionContext, ReadTimeouts, Series

_TOO_MUCH_TO_MATCH: Final = (
    "these arguments are too large to match against the store's rules: use fewer or shorter ones in a call"
)
_PREVIEW_BYTES_MAX: Final = 4096
_FIRST_ATTEMPT: Final = 1
# Maximum delay of an iteration that was due before its series ended.
_LATE_SECONDS: Final = 60.0
_UNEXECUTED_MAX: Final = 10_000
_UNGATED: Final = {
    ExecutionContext.BACKEND: Disposition.RUN,
    ExecutionContext.FRONTEND: Disposition.OFFER,
    ExecutionContext.HUMAN: Disposition.ASK,
    ExecutionContext.AGENT: Disposition.DELEGATE,
}

Proposed = tuple[CallContext, ProposedCall]

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict with its audit entry. `call` is None if the tool is unavailable or the arguments are invalid."""

    verdict: Verdict
    draft: AuditDraft
    call: FittingCall | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Decides, step by step, whether a call may start. It never runs the call.

    1. `judge_batch`: the model proposes calls. Checks that the user may call the tool, that the arguments match the
      schema, that no earlier call in the batch is identical, and that no rule denies the call. The verdict states what
      must happen first, which is often an approval. `reads_of` returns a read-only batch's jobs if they may start
      immediately.
    2. `admit`: the run requests the execution. Repeats all checks. An approval must be for this exact call.
    3. `check_rules`: checks that the current rules still allow the call, unless it has already started.
    4. `cached`: returns a cached result of a READ_ONLY tool instead of running the call, if there is one.
    5. `begin`: checks that the journal has no earlier start. By then, the attempt holds the call's resource locks.
    6. `permit`: applies the rate limits and records the start in the audit chain. Then the tool is called.

    If `store_calls_per_minute` is 0, calls are not limited.
    """

    catalog: Catalog
    rules: Rules
    journal: PostgresExecutionJournal
    limits: PostgresRateLimits
    cache: ResultCache
    audit: AuditTrail
    observer: RegistryMetrics
    grants: PostgresGrantUses
    # See `ProcessRunner.answer`.
    answer: Callable[[str, Callable[[], Any]], Awaitable[Any]]
    store_calls_per_minute: int = 0
    # Tokens of attempts that may have written a journal entry but never ran the tool, because the write failed.
    unexecuted: set[str] = field(default_factory=set)

    async def judge_batch(self, proposed: Sequence[Proposed], known_names: Iterable[str]) -> list[Judged]:
        """Return a verdict for each call in a batch, in order. Nothing is written to the audit chain yet.

        Refuse a call that would repeat the effect of an earlier call in the batch, which is nearly always a mistake by
        the model.
        """
        first: dict[tuple[str, bytes], int] = {}
        judged = []
        for number, (context, call) in enumerate(proposed, 1):
            fitting = await self._fitting(context, call, known_names)
            if isinstance(fitting, Verdict):
                verdict = fitting
            else:
                key = (fitting.definition.name, fitting.accepted.canonical)
                if key in first:
                    # Must come before the rules are applied, because that would count a use.
                    verdict = _duplicate(fitting, first[key], proposed[first[key] - 1][0].call_id)
                else:
                    verdict = await self._judged(fitting, call)
                    if verdict.accepted is not None and fitting.definition.effect is not EffectClass.READ_ONLY:
                        first[key] = number
            self.observer.checks.labels(verdict.disposition).inc()
            judged.append(
                Judged(
                    verdict=verdict,
                    draft=self.audit.of_proposal(context, call.label, verdict),
                    call=fitting if isinstance(fitting, FittingCall) else None,
                )
            )
        return judged

    def reads_of(self, judged: Sequence[Judged], timeouts: ReadTimeouts) -> list[Job]:
        """Return the batch's jobs if all accepted calls may start immediately. Otherwise, return an empty list."""
        jobs = []
        for each in judged:
            if each.verdict.disposition is Disposition.REFUSE:
                continue
            call, verdict = each.call, each.verdict
            if call is None or call.tool.loaded is None or self.store_calls_per_minute:
                return []
            if verdict.disposition is not Disposition.RUN or verdict.rule_id or verdict.digest:
                return []
            request = ExecuteRequest(
                context=call.context,
                call_id=call.context.call_id,
                tool_name=call.definition.name,
                tool_version=call.tool.entry.version,
                arguments_json=call.accepted.canonical,
                timeout_seconds=min(
                    call.definition.timeout_seconds or timeouts.timeout_seconds, timeouts.timeout_seconds_max
                ),
            )
            job = Job.of(call, call.tool.loaded, request, digest=call.digest, is_gated=False)
            if not job.only_reads:
                return []
            jobs.append(replace(job, proposal=Proposal(drafts=(each.draft,))))
        return jobs

    async def _fitting(
        self, context: CallContext, call: ProposedCall, known_names: Iterable[str]
    ) -> FittingCall | Verdict:
        tool = None
        if call.own_tool is not None:
            tool = self.catalog.own(context.store_id, call.own_tool)
        elif call.tool_version:
            tool = await self.catalog.find(context.store_id, call.tool_name, call.tool_version)
        if tool is None or not tool.may_be_called_by(context.user_id, context.user_roles):
            message = f"there is no tool {call.tool_name[:80]!r}{did_you_mean(call.tool_name, known_names)}"
            return _refused(context, "TOOL_NOT_FOUND", message)
        accepted = await self.catalog.check(context.store_id, tool, call.arguments)
        if isinstance(accepted, Refused):
            return _refused(context, accepted.reason, accepted.message, tool)
        if not tool.is_available:
            gone = f"the tool {tool.definition.name} is no longer available"
            return _refused(context, "TOOL_NOT_FOUND", gone, tool)
        try:
            return await self._counted(context, tool, accepted)
        except InvalidArguments as error:
            return _refused(context, "INVALID_ARGUMENTS", str(error), tool)

    async def _judged(self, call: FittingCall, proposed: ProposedCall) -> Verdict:
        is_edited, series_digest = proposed.is_edited, call.grant_digest(proposed.series)
        context, definition, arguments = call.context, call.definition, call.accepted.arguments
        cause = call.gate()
        try:
            rule = await self.rules.deciding(context.store_id, call.ruled())
        except TooMuchToMatch:
            return _refused(context, "INVALID_ARGUMENTS", _TOO_MUCH_TO_MATCH, call.tool)
        if rule is not None:
            match rule.effect:
                case RuleEffect.DENY:
                    return replace(_refused(context, "NOT_ALLOWED", _denial(rule), call.tool), rule_id=rule.rule_id)
                case RuleEffect.ASK if definition.context is not ExecutionContext.HUMAN:
                    cause = ", ".join(filter(None, (cause, f"rule {rule.rule_id}")))
                    series_digest = ""
                case RuleEffect.ALLOW if (
                    cause
                    and not is_edited
                    and await self.rules.repository.use(context.store_id, rule.rule_id, context.call_id)
                ):
                    cause = ""
                case _:
                    rule = None
        is_granted = bool(cause) and await self._is_granted(context, proposed.series, series_digest)
        return Verdict(
            call_id=context.call_id,
            disposition=Disposition.APPROVE if cause and not is_granted else _UNGATED[definition.context],
            definition=definition,
            tool_version=call.tool.entry.version,
            accepted=call.accepted,
            resource_keys=resource_keys(definition.resource_keys, arguments),
            # The ledger identifies approved calls by digest. An edited call gets a digest even if it needs no approval.
            digest=call.digest if cause or is_edited else "",
            preview=await self._preview(call) if cause and not is_granted else "",
            approval_cause=cause,
            approvals_required=call.approvals_required if cause else 0,
            question=question_of(definition, arguments) if definition.context is ExecutionContext.HUMAN else None,
            rule_id=rule.rule_id if rule else "",
            series_digest=series_digest if cause or is_edited else "",
            grant_call_id=proposed.series.grant_call_id if is_granted and proposed.series else "",
        )

    async def _counted(self, context: CallContext, tool: CatalogTool, accepted: Accepted) -> FittingCall:
        """Return the checked call with the count from the tool's own `bulk_count`, if the tool has one.

        Raises:
            InvalidArguments: The tool's `bulk_count` takes too long.
        """
        own_count, name = None, tool.definition.name
        count = tool.loaded.tool.bulk_count(accepted.arguments) if tool.loaded is not None else None
        if count is not None:
            try:
                own_count = await self.answer(name, count)
            except TakesTooLong:
                raise InvalidArguments(f"bulk_count of {name} takes too long for these arguments") from None
            except Exception as error:  # noqa: BLE001  # author code: fall back to the count of the definition
                _log.warning("tool.bulk_count_failed", tool=name, error=type(error).__name__)
        return FittingCall(context=context, tool=tool, accepted=accepted, own_count=own_count)

    async def _preview(self, call: FittingCall) -> str:
        loaded, name = call.tool.loaded, call.definition.name
        preview = loaded.tool.preview(call.accepted.arguments) if loaded is not None else None
        if preview is None:
            return ""
        try:
            return shortened(visible(await self.answer(name, preview)), _PREVIEW_BYTES_MAX)
        except Exception as error:  # noqa: BLE001  # author code: the approver sees the arguments instead
            _log.warning("tool.preview_failed", tool=name, error=type(error).__name__)
            return ""

    async def _is_granted(self, context: CallContext, series: Series | None, digest: str) -> bool:
        if series is None or not digest or series.digest != digest:
            return False
        if series.end_time is not None and self.rules.clock.now() > series.end_time + _LATE_SECONDS:
            return False
        return await self.grants.use(context.store_id, digest, context.call_id, uses_max=series.iterations_max)

    async def admit(self, request: ExecuteRequest) -> Job:
        """Repeat all checks for an execution request and return its job.

        Raises:
            ToolNotFound: The backend tool does not exist, or the user may not call it.
            InvalidArguments: The arguments do not match the schema.
            ApprovalRequired: The call is gated, and there is no approval for this exact call, no grant for its series
                and no rule that allows it.
        """
        context, name = request.context, request.tool_name
        tool = await self.catalog.find(context.store_id, name, request.tool_version)
        if tool is None or tool.loaded is None or not tool.may_be_called_by(context.user_id, context.user_roles):
            raise ToolNotFound(f"there is no tool {name!r} to run", tool_name=name)
        if tool.definition.context is not ExecutionContext.BACKEND:
            raise ToolNotFound(f"{name!r} does not run in the registry", tool_name=name)
        accepted = await self.catalog.check(context.store_id, tool, request.arguments_json)
        if isinstance(accepted, Refused):
            raise InvalidArguments(accepted.message)
        call = await self._counted(context, tool, accepted)
        digest, cause = call.digest, call.gate()
        job = Job.of(call, tool.loaded, request, digest=digest, is_gated=bool(cause))
        # An approval for a different call is a sign of tampering.
        is_allowed = job.grant is not None or bool(request.rule_id)
        if not job.is_approved and (request.approved_digest or (cause and not is_allowed)):
            raise ApprovalRequired(
                f"{name} requires approval of exactly this call ({cause or 'the approval is for another call'})"
            )
        return job

    async def check_rules(self, job: Job) -> None:
        """Check that current rules allow the call.

        A call that has already started passes, so that its result can be read.

        Raises:
            InvalidArguments: Matching the rules and arguments would take too many steps.
            PermissionDenied: A rule denies the call.
            ApprovalRequired: A rule requires an approval, the rule that allowed the call no longer does, or the grant
                covering it has no uses left.
        """
        refusal = await self._refusal(job)
        if refusal is not None and not (job.effect.is_journaled and await self.journal.find(job.key)):
            raise refusal

    async def _refusal(self, job: Job) -> PawlError | None:
        store_id, call_id = job.key.store_id, job.key.call_id
        try:
            rule = await self.rules.deciding(store_id, job.ruled)
        except TooMuchToMatch:
            return InvalidArguments(_TOO_MUCH_TO_MATCH)
        if rule is not None and rule.effect is RuleEffect.DENY:
            return PermissionDenied(_denial(rule))
        if rule is not None and rule.effect is RuleEffect.ASK and not job.is_approved:
            return ApprovalRequired(f"{job.definition.name} requires approval (rule {rule.rule_id})")
        if job.allowing_rule_id and not await self.rules.repository.has_allowed(
            store_id, job.allowing_rule_id, call_id
        ):
            return ApprovalRequired(f"the rule that allowed {job.definition.name} is no longer in force")
        grant = job.grant
        if grant is None:
            return None
        is_counted = await self.grants.use(store_id, grant.digest, call_id, uses_max=grant.iterations_max)
        if is_counted or job.is_approved:
            return None
        return ApprovalRequired(f"the grant that covers {job.definition.name} has been used up")

    async def cached(self, job: Job) -> ExecutionResult | None:
        """Return a cached result of the same READ_ONLY call, or None. A hit is recorded in the audit chain first.

        Raises:
            DependencyUnavailable: The audit chain cannot be written.
        """
        found = self.cache.find(job)
        if found is not None:
            await self.audit.ended(job, found, reason="CACHED")
        return found

    async def begin(self, job: Job, token: str) -> Begun | HeldElsewhere | ExecutionResult:
        """Record the start of an attempt in the journal, or return the call's recorded state.

        Raises:
            InvalidArguments, DependencyUnavailable: See `PostgresExecutionJournal.begin`.
        """
        try:
            return await self.journal.begin(job.journal_call(token), unexecuted=self.unexecuted)
        except BaseException:
            self._remember_unexecuted(token)
            raise

    async def permit(self, job: Job, token: str) -> ExecutionResult | None:
        """Apply rate limits and record the start. Return a result if the call must not start.

        All attempts at a call count as one. The start of a READ_ONLY call is recorded together with its end.

        Raises:
            DependencyUnavailable: The start could not be counted or recorded, so the call must not start.
        """
        try:
            rates = self._rates(job) if job.attempt == _FIRST_ATTEMPT else []
            if rates:
                await self.limits.take(job.context.store_id, rates)
            if job.effect is not EffectClass.READ_ONLY:
                await self.audit.executed(job)
        except Exceeded as exceeded:
            return rate_limited(job.definition.name, exceeded)
        except BaseException:
            self._remember_unexecuted(token)
            raise
        return None

    def _rates(self, job: Job) -> list[Rate]:
        most = {STORE_RATE_NAME: self.store_calls_per_minute, f"tool:{job.definition.name}": job.rate_per_minute}
        return [Rate(name=name, per_minute=per_minute) for name, per_minute in most.items() if per_minute]

    def _remember_unexecuted(self, token: str) -> None:
        if len(self.unexecuted) >= _UNEXECUTED_MAX:
            self.unexecuted.clear()  # The journal then treats their entries as interrupted.
        self.unexecuted.add(token)

    async def ended(self, job: Job, result: ExecutionResult, *, has_begun: bool) -> None:
        """Record the end of an execution, and cache its result if the tool's definition asks for this.

        Raises:
            DependencyUnavailable: The entry may or may not have been written.
        """
        await self.audit.ended(job, result, has_begun=has_begun)
        self.cache.put(job, result)

    async def forget(self, older_than_seconds: float) -> None:
        """Delete expired cached results, idle rate limits and old uses of grants.

        Also delete records older than `older_than_seconds` of calls that rules have allowed.
        """
        self.cache.sweep()
        await self.limits.forget()
        await self.rules.repository.forget(older_than_seconds)
        await self.grants.forget()


def _duplicate(call: FittingCall, earlier: int, call_id: CallId) -> Verdict:
    message = (
        f"this repeats call {earlier} of the batch ({call_id}): {call.definition.name} with the same arguments. "
        "It runs once. To run it twice, call it again after its result"
    )
    return _refused(call.context, "DUPLICATE_CALL", message, call.tool)


def _refused(context: CallContext, reason: str, message: str, tool: CatalogTool | None = None) -> Verdict:
    return Verdict(
        call_id=context.call_id,
        disposition=Disposition.REFUSE,
        definition=tool.definition if tool else None,
        tool_version=tool.entry.version if tool else 0,
        error_reason=reason,
        error_message=message,
    )


def _denial(rule: Rule) -> str:
    whose = {RuleScope.STORE: "the store", RuleScope.AGENT: f"the agent {rule.scope_id}"}.get(rule.scope, "the user")
    return f"a rule of {whose} denies this call ({rule.rule_id})"
