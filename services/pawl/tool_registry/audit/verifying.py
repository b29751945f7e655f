"""Reading a whole audit chain to see whether it is as it was written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from pawl.chassis.ids import StoreId
from pawl.tool.v1 import audit_pb2
from pawl.tool_registry.audit.rules import Head, Problem, Verifier
from pawl.tool_registry.audit.store.audit import PostgresAuditLog

_PAGE: Final = 2000
_PAGES_PER_REPORT: Final = 5


async def verify(
    log: PostgresAuditLog, store_id: StoreId, known: Head | None
) -> AsyncIterator[audit_pb2.VerifyAuditResponse]:
    """Yield how far the chain is good every 10,000 entries, then the end, with `done`.

    Entries that are written meanwhile are not looked at. `known` is a head that
    was kept elsewhere.

    Raises:
        DependencyUnavailable: the chain cannot be read.
    """
    head = await log.head(store_id)
    verifier = Verifier(head, known)
    after: int | None = None
    pages = 0
    while entries := await log.page(store_id, after_seq=after, up_to_seq=head.seq, rows_max=_PAGE):
        for entry in entries:
            problem = verifier.take(entry)
            if problem is not None:
                yield _report(verifier.verified, problem, done=True)
                return
        after = entries[-1].seq
        pages += 1
        if pages % _PAGES_PER_REPORT == 0:
            yield _report(verifier.verified)
    problem = verifier.end(await log.beyond_head(store_id))
    yield _report(verifier.verified, problem, done=True)


def _report(verified: Head, problem: Problem | None = None, *, done: bool = False) -> audit_pb2.VerifyAuditResponse:
    message = audit_pb2.VerifyAuditResponse(verified_seq=verified.seq, verified_hash=verified.hash, done=done)
    if problem is not None:
        message.problem.seq = max(0, problem.seq)
        message.problem.kind = problem.kind
        message.problem.explanation = problem.explanation
    return message
