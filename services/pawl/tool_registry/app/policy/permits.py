"""Permits: whether a call that passed its checks may begin now."""

from __future__ import annotations

from pawl.errors import ApprovalRequired, InvalidArguments, PawlError, PermissionDenied
from pawl.tool_registry.app.policy.admission import Job
from pawl.tool_registry.app.policy.checking import TOO_MUCH_TO_MATCH, denial
from pawl.tool_registry.app.policy.rules import Rules
from pawl.tool_registry.app.ports import ExecutionJournal
from pawl.tool_registry.domain.patterns import TooMuchToMatch
from pawl.tool_registry.domain.rules import RuleEffect


class Permits:
    """Asks people's rules right before a call begins: what was decided since it was checked holds."""

    def __init__(self, rules: Rules, journal: ExecutionJournal) -> None:
        self._rules = rules
        self._journal = journal

    async def check(self, job: Job) -> None:
        """Return if the call may begin, or has begun before: then what became of it is to be told.

        Raises:
            PermissionDenied: a rule denies it.
            ApprovalRequired: a rule asks for an approval, or the one that allowed it
                does so no more.
        """
        refusal = await self._refusal(job)
        if refusal is not None and not (job.effect.is_journaled and await self._journal.look(job.key)):
            raise refusal

    async def forget(self, older_than_seconds: float) -> None:
        """Delete what is known of calls that rules allowed longer ago."""
        await self._rules.forget(older_than_seconds)

    async def _refusal(self, job: Job) -> PawlError | None:
        store_id, call_id = job.key
        try:
            rule = await self._rules.deciding(store_id, job.ruled)
        except TooMuchToMatch:
            return InvalidArguments(TOO_MUCH_TO_MATCH)
        if rule is not None and rule.effect is RuleEffect.DENY:
            return PermissionDenied(denial(rule))
        if rule is not None and rule.effect is RuleEffect.ASK and not job.is_approved:
            return ApprovalRequired(f"{job.definition.name} needs an approval (rule {rule.rule_id})")
        if job.allowing_rule_id and not await self._rules.still_allows(store_id, job.allowing_rule_id, call_id):
            return ApprovalRequired(f"the rule that allowed {job.definition.name} is not in force any more")
        return None
