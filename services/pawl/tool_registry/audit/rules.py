"""A store's audit chain of proposals, decisions, starts and results. Each entry is linked to the previous one.

Entries hold digests of arguments and results, but never the arguments or results themselves. Each digest is keyed with
the conversation's secret. Destroying the secret makes the digests meaningless but leaves the chain intact.

An entry's hash covers its content, its number and the previous hash. To change, remove, insert or move an entry, an
attacker must rebuild all later entries. Comparing the chain with a head stored elsewhere reveals even that.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final

from pawl.chassis.ids import CallId, CredentialId, RunId, StoreId, UserId
from pawl.chassis.strict_json import dumps_canonical, storable
from pawl.values import CallState, Outcome

TOOL_NAME_CHARACTERS_MAX: Final = 80
# Replaces the name of a tool that does not exist.
UNKNOWN_TOOL: Final = "?"

_SCHEME: Final = "pawl.audit.1"


class AuditKind(StrEnum):
    # The call was checked. `verdict` is the disposition; `reason` is why the call is gated or refused, or the deciding
    # rule.
    PROPOSED = "PROPOSED"
    # A user decided. `verdict` is the kind of decision, `by_user_id` the user. For a series, `reason` is `grant` and
    # the call id; entries for the grant's uses repeat both.
    DECIDED = "DECIDED"
    # The call is about to start. `verdict` is APPROVED, RULE, GRANT or empty; `reason` is the rule or the grant.
    EXECUTED = "EXECUTED"
    # The call ended. `verdict` is the outcome. `reason` is the error reason, CACHED, LATE (after the call had ended) or
    # COMPLETED (completed from outside). `by_user_id` is the user who completed it from outside or, for a front-end
    # call, returned the result or claimed the call.
    RETURNED = "RETURNED"
    # A user created or revoked a rule. `verdict` is MADE or REVOKED, `reason` the rule id. If the approval of a
    # call created the rule, that call is recorded.
    RULE = "RULE"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """An entry before it is added to the chain. Times are microseconds since 1970.

    `credential_id` is the credential that started the run, and `delegate_user_id` is the delegate that acted for the
    user. `by_credential_id` and `by_delegate_user_id` are their counterparts for `by_user_id`. `agent_name` is the
    run's agent. Fields that do not apply are empty.
    """

    store_id: StoreId
    # An AuditKind, unless the row was tampered with.
    kind: str
    time_us: int
    user_id: UserId
    run_id: RunId
    call_id: CallId
    tool_name: str
    tool_version: int
    verdict: str
    reason: str = ""
    by_user_id: UserId = UserId("")
    arguments_sha256: str = ""
    result_sha256: str = ""
    result_bytes: int = 0
    duration_us: int = 0
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    by_credential_id: CredentialId = CredentialId("")
    by_delegate_user_id: UserId = UserId("")
    agent_name: str = ""
    # The conversation or rule whose secret keys the digests. Not part of the chain, because its digests are keyed.
    key_id: str = ""

    @property
    def is_reported(self) -> bool:
        """True if another service reported the event. Reports may be repeated, but each event is recorded only once."""
        return self.kind == AuditKind.DECIDED or (self.kind == AuditKind.RETURNED and self.by_user_id != "")


# The outcome and the reason of a front-end call, by its final state.
ENDS: Final[Mapping[int, tuple[Outcome, str]]] = {
    CallState.SUCCEEDED: (Outcome.SUCCEEDED, ""),
    CallState.FAILED: (Outcome.FAILED, "TOOL_ERROR"),
    CallState.EXPIRED: (Outcome.FAILED, "EXPIRED"),
    CallState.CANCELLED: (Outcome.CANCELLED, "CANCELLED"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last entry of a chain. For an empty chain, `seq` is 0 and `hash` is empty."""

    seq: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry in the chain. Numbers start at 1 and have no gaps."""

    draft: AuditDraft
    seq: int
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The first bad entry in a chain."""

    seq: int
    # HASH_MISMATCH, BROKEN_LINK, GAP, CUT_TAIL, BEYOND_HEAD or HEAD_MISMATCH.
    kind: str
    explanation: str


def sealed(draft: AuditDraft, secret: bytes) -> AuditDraft:
    """Return the entry with its digests keyed with a secret, so that the content cannot be guessed from them."""
    return replace(
        draft,
        arguments_sha256=_keyed(draft.arguments_sha256, secret),
        result_sha256=_keyed(draft.result_sha256, secret),
    )


def _keyed(digest: str, secret: bytes) -> str:
    return hmac.digest(secret, digest.encode(), "sha256").hex() if digest else ""


def chained(head: Head, drafts: Sequence[AuditDraft]) -> list[AuditEntry]:
    """Return the drafts as chain entries after `head`, in order. All drafts must belong to one store."""
    entries = []
    for draft in drafts:
        seq = head.seq + 1
        entry = AuditEntry(draft=draft, seq=seq, prev_hash=head.hash, hash=entry_hash(draft, seq, head.hash))
        entries.append(entry)
        head = Head(seq=seq, hash=entry.hash)
    return entries


def entry_hash(draft: AuditDraft, seq: int, prev_hash: str) -> str:
    """Return the SHA-256, in hex, of an entry's content and position."""
    return hashlib.sha256(
        dumps_canonical(
            [
                _SCHEME,
                seq,
                prev_hash,
                draft.store_id,
                str(draft.kind),
                draft.time_us,
                draft.user_id,
                draft.run_id,
                draft.call_id,
                draft.tool_name,
                draft.tool_version,
                draft.verdict,
                draft.reason,
                draft.by_user_id,
                draft.arguments_sha256,
                draft.result_sha256,
                draft.result_bytes,
                draft.duration_us,
                draft.credential_id,
                draft.delegate_user_id,
                draft.by_credential_id,
                draft.by_delegate_user_id,
                draft.agent_name,
            ]
        )
    ).hexdigest()


class Verifier:
    """Checks a chain's entries in order.

    `head` is the last entry according to the database. `known` is a head that was stored elsewhere.
    """

    def __init__(self, head: Head, known: Head | None = None) -> None:
        self._head = head
        self._known = known
        self.verified = Head()  # The last valid entry.

    def take(self, entry: AuditEntry) -> Problem | None:
        """Check the next entry. Return the problem with it, or None if it is valid."""
        expected = self.verified.seq + 1
        if entry.seq != expected:
            return Problem(
                seq=expected, kind="GAP", explanation=f"entry {expected} is missing: the next one is {entry.seq}"
            )
        if entry_hash(entry.draft, entry.seq, entry.prev_hash) != entry.hash:
            return Problem(seq=entry.seq, kind="HASH_MISMATCH", explanation=f"entry {entry.seq} was changed")
        if entry.prev_hash != self.verified.hash:
            return Problem(
                seq=entry.seq,
                kind="BROKEN_LINK",
                explanation=f"entry {entry.seq} does not follow entry {self.verified.seq}: one of them was replaced",
            )
        if self._known is not None and entry.seq == self._known.seq and entry.hash != self._known.hash:
            return Problem(
                seq=entry.seq,
                kind="HEAD_MISMATCH",
                explanation=f"entry {entry.seq} does not have the known hash: the chain was rebuilt",
            )
        self.verified = Head(seq=entry.seq, hash=entry.hash)
        return None

    def end(self, beyond_head: int) -> Problem | None:
        """Check the end of the chain.

        `beyond_head` is the number of an entry after the recorded head, or 0 if there is none.
        """
        last = self.verified.seq
        due = max(self._head.seq, self._known.seq if self._known else 0)
        if last < due:
            return Problem(
                seq=last + 1,
                kind="CUT_TAIL",
                explanation=f"the chain had {due} entries, but now ends with entry {last}",
            )
        if beyond_head:
            return Problem(
                seq=beyond_head,
                kind="BEYOND_HEAD",
                explanation=f"entry {beyond_head} is after the recorded head: it was inserted, or the head was moved",
            )
        if self.verified.hash != self._head.hash:
            return Problem(
                seq=last, kind="HEAD_MISMATCH", explanation=f"entry {last} does not have the recorded head's hash"
            )
        return None


def sha256_hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def clean_name(tool_name: str) -> str:
    """Return a storable form of a tool name, which the model may have invented."""
    return storable(tool_name[:TOOL_NAME_CHARACTERS_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """A filter on a store's entries. Empty fields and None match anything."""

    store_id: StoreId
    run_id: RunId = RunId("")
    call_id: CallId = CallId("")
    tool_name: str = ""
    user_id: UserId = UserId("")
    agent_name: str = ""
    kind: str = ""
    since_time: datetime | None = None
    before_time: datetime | None = None
