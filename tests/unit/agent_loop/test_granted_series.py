"""Series that people have granted: what covers their iterations, and when they ask again."""

from __future__ import annotations

from dataclasses import replace as replace_fields

from msgspec.structs import replace

from pawl.agent_loop.domain.call import CallState, DecisionKind
from pawl.agent_loop.domain.command import Decide
from pawl.agent_loop.domain.run import RunState
from pawl.agent_loop.domain.tool import Disposition, ProposedCall, Verdict
from tests.fakes.model import calls, says
from tests.fakes.registry import FakeRegistry
from tests.unit.agent_loop.test_jobs import Story, background


class GrantingRegistry(FakeRegistry):
    """A registry in which the series of the gated tool can be granted, and each iteration under the grant runs."""

    GRANT = "cd" * 32

    def _verdict(self, call: ProposedCall) -> Verdict:
        verdict = super()._verdict(call)
        if call.series is None:
            return verdict
        is_granted = call.series.digest == self.GRANT
        disposition = Disposition.RUN if is_granted else Disposition.APPROVE
        return replace(verdict, series_digest=self.GRANT, disposition=disposition)


async def test_a_series_asks_again_once_more_people_must_approve_than_have_granted_it() -> None:
    """I9: the deployment wants two from now on; one person's grant is over, and that of two covers what is left."""

    story = Story(calls(background("gated", _interval=60, _stopAfter=6)), says("Begun."), seconds=1.0)
    story.world.registry.__class__ = GrantingRegistry
    ledger = story.world.ledger
    story.say("do it")

    def asked(number: int) -> bool:
        calls = story.calls(story.jobs[0]) if story.jobs else []
        return len(calls) == number and calls[-1].state is CallState.AWAITING_APPROVAL

    async def approve(approver: str) -> None:
        call = story.calls(story.jobs[0])[-1]
        kind = Decide(call_id=call.call_id, kind=DecisionKind.APPROVE, for_series=True)
        await ledger.send(story.key(story.jobs[0]), kind, approver=approver)

    def grant() -> tuple[bool, int]:
        given = ledger.row(story.key(story.jobs[0])).grant
        assert given is not None
        return given.ended, given.uses

    await story.until(lambda: asked(1))
    await approve("cyd")
    await story.until(lambda: len(story.world.registry.effects) == 2)
    assert grant() == (False, 2)
    story.world.dependencies = replace_fields(story.world.dependencies, approvals_required=2)
    await story.until(lambda: asked(3))
    assert (len(story.world.registry.effects), grant()) == (2, (True, 2))
    for number, approver in enumerate(("cyd", "dan")):
        assert asked(3), f"{number} of 2 have approved"
        await approve(approver)
    await story.until(lambda: len(story.world.registry.effects) == 5)
    assert grant() == (False, 5)
    story.world.dependencies = replace_fields(story.world.dependencies, approvals_required=1)
    await story.until(lambda: story.is_over)
    assert (story.jobs[0].state, grant()) == (RunState.COMPLETED, (False, 6))
