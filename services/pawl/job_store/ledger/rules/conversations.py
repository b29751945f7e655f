"""Conversations as people know them: by a key of theirs, by a title, out of the way in the archive."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, RunId, RunKey, StoreId, UserId
from pawl.errors import ConversationErased, ConversationNotFound, InvalidField, RequestIdReused, TooLarge
from pawl.job_store.ledger.rules import stop
from pawl.job_store.ledger.rules.approval import Actor
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, RequestKey, RequestRow, RunRow
from pawl.job_store.ledger.rules.states import Sharing
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import StopCause

KEY_BYTES_MAX: Final = 200
TITLE_CHARACTERS_MAX: Final = 200
"""Most characters of a title that a user gives."""
MADE_TITLE_CHARACTERS_MAX: Final = 80
_LOOKED_AT_CHARACTERS: Final = 4096
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ELLIPSIS: Final = "…"
# Whole words, unless the last of them is longer than that.
_KEPT_CHARACTERS_MIN: Final = 40


def key_hash(store_id: StoreId, user_id: UserId, key: str) -> bytes:
    """Return what is kept of a key that a client has chosen.

    Raises:
        TooLarge: it is longer than 200 bytes.
    """
    if len(key.encode()) > KEY_BYTES_MAX:
        raise TooLarge(f"conversation_key has at most {KEY_BYTES_MAX} bytes", field="conversation_key")
    return hashlib.sha256(f"{store_id}\0{user_id}\0{key}".encode()).digest()


def check_title(title: str) -> str:
    """Return a title that a user gives, which may be empty: one printable line of at most 200 characters.

    Raises:
        InvalidField: it is longer, has more lines, only blanks, or control characters.
    """
    if len(title) > TITLE_CHARACTERS_MAX:
        raise InvalidField(f"title has at most {TITLE_CHARACTERS_MAX} characters", field="title")
    if title and (len(title.splitlines()) > 1 or not title.strip() or _CONTROL.search(title)):
        raise InvalidField("title must be one line of text without control characters", field="title")
    return title


def made_title(text: str) -> str:
    """Return the first line of a message that says something, at most 80 characters; empty if none does."""
    for line in text[:_LOOKED_AT_CHARACTERS].splitlines():
        title = " ".join("".join(each if each.isprintable() else " " for each in line).split())
        if title:
            return _cut(title)
    return ""


def _cut(title: str) -> str:
    if len(title) <= MADE_TITLE_CHARACTERS_MAX:
        return title
    kept = title[: MADE_TITLE_CHARACTERS_MAX - 1]
    words_end = kept.rfind(" ")
    return (kept[:words_end] if words_end >= _KEPT_CHARACTERS_MIN else kept).rstrip() + _ELLIPSIS


def absent(conversation: ConversationRow | None, user_id: UserId) -> ConversationNotFound | ConversationErased:
    """Return the answer to a user about a conversation that is none of theirs any more, or never was."""
    if conversation is not None and user_id and conversation.erase_user_id == user_id:
        return ConversationErased()
    return ConversationNotFound()


def same(earlier: RequestRow | None, fingerprint: bytes) -> RequestRow | None:
    """Return the request that came before with a request id, if one did.

    Raises:
        RequestIdReused: it came with something else.
    """
    if earlier is not None and earlier.fingerprint != fingerprint:
        raise RequestIdReused
    return earlier


class ConversationRequest(Actor, frozen=True, kw_only=True):
    """A request about a conversation; `request_id` is empty for one that is not to be remembered."""

    store_id: StoreId
    request_id: RequestId
    fingerprint: bytes

    @property
    def request_keys(self) -> tuple[RequestKey, ...]:
        """The keys of its request; none if it is not to be remembered."""
        return (RequestKey(self.store_id, self.user_id, self.request_id),) if self.request_id else ()

    def earlier(self, unit: UnitOfWork) -> RequestRow | None:
        """Return the same request, if it has come before.

        Raises:
            RequestIdReused: the request id came before with something else.
        """
        return same(unit.requests.get(self.request_keys[0]) if self.request_id else None, self.fingerprint)

    def remember(
        self,
        unit: UnitOfWork,
        conversation_id: ConversationId = ConversationId(""),
        *,
        run_id: RunId = RunId(""),
        steered: bool = False,
    ) -> None:
        """Remember the request, with the conversation that it was about or has made, or its run."""
        for key in self.request_keys:
            request = RequestRow(
                store_id=self.store_id,
                user_id=self.user_id,
                request_id=self.request_id,
                fingerprint=self.fingerprint,
                run_id=run_id,
                steered=steered,
                create_time=unit.now,
                conversation_id=conversation_id,
            )
            unit.requests.put(key, request)

    def found(self, unit: UnitOfWork, conversation_id: ConversationId) -> ConversationRow:
        """Return a conversation of the user.

        Raises:
            ConversationNotFound: absent, or of another user.
            ConversationErased: the user has erased it.
        """
        conversation = unit.conversations.get(ConversationKey(self.store_id, conversation_id))
        if conversation is None or conversation.user_id != self.user_id:
            raise absent(conversation, self.user_id)
        return conversation


class UpdateConversation(ConversationRequest, frozen=True, kw_only=True):
    """Give a conversation a title (an empty one for that which was made) or labels, archive it or not, or share it.

    None leaves what is there. Where it is not shared for writing any more, open runs of others are stopped: their
    owners read `cancel`. Those whose options `is_undo` knows go on: what they have begun to take back, they take back.
    Notices of others are removed: their jobs keep what they came to, and those that are open are to be stopped next.
    """

    conversation_id: ConversationId
    title: str | None = None
    archived: bool | None = None
    labels: Mapping[str, str] | None = None
    sharing: Sharing | None = None
    shows_arguments: bool | None = None
    cancel: bytes = b""
    is_undo: Callable[[bytes], bool] = lambda _: False

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        conversations = (ConversationKey(self.store_id, self.conversation_id),)
        stopped = ((*conversations, self.user_id),) if self.ends_writing else ()
        return RowKeys(requests=self.request_keys, conversations=conversations, stopped=stopped)

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that are given."""
        asked = {name: getattr(self, name) for name in ("title", "archived", "labels", "sharing", "shows_arguments")}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def ends_writing(self) -> bool:
        """Whether nobody else may write to it from now on."""
        return self.sharing not in {None, Sharing.WRITE}

    def apply(self, unit: UnitOfWork) -> ConversationRow:
        """Change the conversation and return it; the same request again changes nothing.

        Raises:
            RequestIdReused: the request id came before with something else.
            ConversationNotFound: absent, or of another user.
            ConversationErased: the user has erased it.
        """
        earlier = self.earlier(unit)
        conversation = self.found(unit, self.conversation_id)
        if earlier is not None:
            return conversation
        self.remember(unit, self.conversation_id)
        changed = unit.put_conversation(replace(conversation, **self.changes))
        if not self.ends_writing:
            return changed
        notices = tuple(each for each in changed.background.notices if each.user_id == self.user_id)
        changed = unit.put_conversation(replace(changed, background=replace(changed.background, notices=notices)))
        # The active one at last: none of those that go gets the turn from it.
        for run_id in (*changed.queue, changed.active_run_id or RunId("")):
            run = unit.runs.get(RunKey(self.store_id, run_id))
            if run is not None and run.user_id != self.user_id and not self.is_undo(run.options):
                stop.command(unit, run, StopCause.USER, self.cancel, user_id=self.user_id)
        return unit.conversations.get(changed.key) or changed


ATTEMPTS_MAX: Final = 3
"""So often a model is asked for the title of a conversation."""
TEXT_CHARACTERS_MAX: Final = 4096
"""Of the message, the answer, and what the model says, no more is looked at."""
_LINES_MAX: Final = 100
_AROUND: Final = " \"'`*_#“”„«»‘’「」"  # noqa: RUF001  # quotes of several languages
_THOUGHT: Final = "</think>"


def ask(unit: UnitOfWork, run: RunRow) -> None:
    """Have a title made of the conversation of a run that has answered.

    Once, and not of one that has a title of its user's, nor of one that does a call of another run, nor of a run of
    another user: what is said in it is the writer's.
    """
    conversation = unit.conversation_of(run)
    is_known = conversation.title or conversation.title_run_id or conversation.parent_run_id
    if not is_known and run.user_id == conversation.user_id:
        unit.put_conversation(replace(conversation, title_at=unit.now, title_run_id=run.run_id))


def said_title(text: str) -> str:
    """Return the title in what a model has said: its first line, without quotes; at most 80 characters."""
    for line in text[:TEXT_CHARACTERS_MAX].rpartition(_THOUGHT)[2].splitlines()[:_LINES_MAX]:
        title = made_title(line).strip(_AROUND)
        if title:
            return title
    return ""
