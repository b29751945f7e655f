"""The audit chain of a store: what was proposed, decided, begun and returned, each entry bound to the one before.

An entry holds digests of arguments and results, never the things themselves, and
each digest is made with a secret of the conversation: once that is destroyed they
say nothing, and the chain is as whole as before. Its
hash covers all of it, its number and the hash of the entry before; so whoever
changes, removes, inserts or moves one has to make all later ones anew, and a head
that is kept elsewhere shows that too.
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
UNKNOWN_TOOL: Final = "?"
"""The name of what was called and is no tool."""

_SCHEME: Final = "pawl.audit.1"


class AuditKind(StrEnum):
    """The kinds of entry about a call."""

    PROPOSED = "PROPOSED"
    """It was checked: `verdict` is the disposition, `reason` why it is gated or refused, or the rule that decided."""
    DECIDED = "DECIDED"
    """A person decided about it: `verdict` is the kind of the decision, `by_user_id` who. Of one for a series `reason`
    is `grant` and the call: so the entries name it that are about its uses."""
    EXECUTED = "EXECUTED"
    """It is about to begin: `verdict` is APPROVED if it had an approval, RULE or GRANT if one stood for that, else
    empty;
    `reason` is the rule, or the grant."""
    RETURNED = "RETURNED"
    """It has ended: `verdict` is the outcome, `reason` that of an error, or CACHED, or LATE for what went on, or
    COMPLETED for a result from outside. `by_user_id` is who brought the end from outside or, of a front-end call, who
    brought the result, or held the call."""
    RULE = "RULE"
    """Somebody made or revoked a rule: `verdict` is MADE or REVOKED, `reason` its id. The call is that whose approval
    made it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """An entry without its place in the chain. Times are microseconds since 1970.

    `credential_id` started the run, for which the delegate `delegate_user_id` acted for its user if one did;
    `by_credential_id` and `by_delegate_user_id` say the same of `by_user_id`, and `agent_name` drives the run. Empty if
    not known.
    """

    store_id: StoreId
    kind: str
    """An AuditKind, unless somebody has changed it in the database."""
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
    key_id: str = ""
    """The conversation, or the rule, with whose secret its digests are to be made. In the chain they are."""

    @property
    def is_reported(self) -> bool:
        """True if another service told of it, and may tell again what is written once."""
        return self.kind == AuditKind.DECIDED or (self.kind == AuditKind.RETURNED and self.by_user_id != "")


ENDS: Final[Mapping[int, tuple[Outcome, str]]] = {
    CallState.SUCCEEDED: (Outcome.SUCCEEDED, ""),
    CallState.FAILED: (Outcome.FAILED, "TOOL_ERROR"),
    CallState.EXPIRED: (Outcome.FAILED, "EXPIRED"),
    CallState.CANCELLED: (Outcome.CANCELLED, "CANCELLED"),
}
"""Outcome and reason of a front-end call, by the state that it ended in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last entry of a chain; number 0 and no hash for an empty one."""

    seq: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry of the chain. Numbers begin at 1 and have no gaps."""

    draft: AuditDraft
    seq: int
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The first entry that is not as it was written, and what is wrong with it."""

    seq: int
    kind: str
    """HASH_MISMATCH, BROKEN_LINK, GAP, CUT_TAIL, BEYOND_HEAD or HEAD_MISMATCH."""
    explanation: str


def sealed(draft: AuditDraft, secret: bytes) -> AuditDraft:
    """Return an entry whose digests nobody can tell, or guess the content of, without the secret."""
    return replace(
        draft,
        arguments_sha256=_keyed(draft.arguments_sha256, secret),
        result_sha256=_keyed(draft.result_sha256, secret),
    )


def _keyed(digest: str, secret: bytes) -> str:
    return hmac.digest(secret, digest.encode(), "sha256").hex() if digest else ""


def chained(head: Head, drafts: Sequence[AuditDraft]) -> list[AuditEntry]:
    """Return the entries that follow `head`, in order. All are of one store."""
    entries = []
    for draft in drafts:
        seq = head.seq + 1
        entry = AuditEntry(draft=draft, seq=seq, prev_hash=head.hash, hash=entry_hash(draft, seq, head.hash))
        entries.append(entry)
        head = Head(seq=seq, hash=entry.hash)
    return entries


def entry_hash(draft: AuditDraft, seq: int, prev_hash: str) -> str:
    """Return the SHA-256, in hex, of everything that an entry says and of its place."""
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
    """Takes the entries of a chain in the order of their numbers and says what is wrong with the first bad one.

    `head` is what the database says the last entry is, `known` a head that was
    kept elsewhere.
    """

    def __init__(self, head: Head, known: Head | None = None) -> None:
        self._head = head
        self._known = known
        self.verified = Head()  # The last entry that is good.

    def take(self, entry: AuditEntry) -> Problem | None:
        """Return what is wrong with the next entry, if anything."""
        expected = self.verified.seq + 1
        if entry.seq != expected:
            return Problem(seq=expected, kind="GAP", explanation=f"entry {expected} is missing, {entry.seq} comes next")
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
                explanation=f"entry {entry.seq} is not the one whose hash was kept: the chain was made anew",
            )
        self.verified = Head(seq=entry.seq, hash=entry.hash)
        return None

    def end(self, beyond_head: int) -> Problem | None:
        """Return what is wrong with the end; `beyond_head` is an entry behind the recorded head, 0 for none."""
        last = self.verified.seq
        due = max(self._head.seq, self._known.seq if self._known else 0)
        if last < due:
            return Problem(
                seq=last + 1, kind="CUT_TAIL", explanation=f"the chain had {due} entries and ends with {last}"
            )
        if beyond_head:
            return Problem(
                seq=beyond_head,
                kind="BEYOND_HEAD",
                explanation=f"entry {beyond_head} stands behind the head: it was inserted, or the head was moved",
            )
        if self.verified.hash != self._head.hash:
            return Problem(
                seq=last, kind="HEAD_MISMATCH", explanation=f"entry {last} is not the one that the head names"
            )
        return None


def sha256_hex(content: bytes) -> str:
    """Return the SHA-256, in hex, of arguments or of a result."""
    return hashlib.sha256(content).hexdigest()


def clean_name(tool_name: str) -> str:
    """Return the name of a tool, which a model may have made up, as it can be stored."""
    return storable(tool_name[:TOOL_NAME_CHARACTERS_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """The entries of a store that are wanted; empty fields and None mean any."""

    store_id: StoreId
    run_id: RunId = RunId("")
    call_id: CallId = CallId("")
    tool_name: str = ""
    user_id: UserId = UserId("")
    agent_name: str = ""
    kind: str = ""
    since_time: datetime | None = None
    before_time: datetime | None = None
