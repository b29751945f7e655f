"""Updates conversations for their users: title, labels, archiving, sharing and client-chosen keys."""

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
# Maximum number of characters in a title that a user sets.
TITLE_CHARACTERS_MAX: Final = 200
MADE_TITLE_CHARACTERS_MAX: Final = 80
_SEARCHED_CHARACTERS_MAX: Final = 4096
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ELLIPSIS: Final = "…"
# Titles are cut between words if that keeps at least this many characters.
_KEPT_CHARACTERS_MIN: Final = 40


def key_hash(store_id: StoreId, user_id: UserId, key: str) -> bytes:
    """Return the stored hash of a conversation key that a client has chosen.

    Raises:
        TooLarge: The key is longer than 200 bytes.
    """
    if len(key.encode()) > KEY_BYTES_MAX:
        raise TooLarge(f"conversation_key must be at most {KEY_BYTES_MAX} bytes", field="conversation_key")
    return hashlib.sha256(f"{store_id}\0{user_id}\0{key}".encode()).digest()


def check_title(title: str) -> str:
    """Return a user's title after checking it. A title is empty or one printable line of at most 200 characters.

    Raises:
        InvalidField: The title is too long, has several lines or control characters, or is blank.
    """
    if len(title) > TITLE_CHARACTERS_MAX:
        raise InvalidField(f"title must be at most {TITLE_CHARACTERS_MAX} characters, got {len(title)}", field="title")
    if title and not title.strip():
        raise InvalidField("title must not be blank: leave it empty for the automatic title", field="title")
    if len(title.splitlines()) > 1 or _CONTROL.search(title):
        raise InvalidField("title must be one line of text without control characters", field="title")
    return title


def made_title(text: str) -> str:
    """Return a title for a message: its first non-blank line, cut to 80 characters.

    It is empty if all lines are blank.
    """
    for line in text[:_SEARCHED_CHARACTERS_MAX].splitlines():
        title = " ".join("".join(each if each.isprintable() else " " for each in line).split())
        if title:
            return _cut(title)
    return ""


def _cut(title: str) -> str:
    if len(title) <= MADE_TITLE_CHARACTERS_MAX:
        return title
    shortened = title[: MADE_TITLE_CHARACTERS_MAX - 1]
    words_end = shortened.rfind(" ")
    return (shortened[:words_end] if words_end >= _KEPT_CHARACTERS_MIN else shortened).rstrip() + _ELLIPSIS


def absent(conversation: ConversationRow | None, user_id: UserId) -> ConversationNotFound | ConversationErased:
    """Return the error for a missing conversation.

    It is ConversationErased if the conversation belonged to the user.
    """
    if conversation is not None and user_id and conversation.erase_user_id == user_id:
        return ConversationErased()
    return ConversationNotFound()


def same(earlier: RequestRow | None, fingerprint: bytes) -> RequestRow | None:
    """Return `earlier`, a previous request with the same id, if the payloads are equal.

    Raises:
        RequestIdReused: The earlier request had a different payload.
    """
    if earlier is not None and earlier.fingerprint != fingerprint:
        raise RequestIdReused
    return earlier


class ConversationRequest(Actor, frozen=True, kw_only=True):
    """A request about a conversation. A request with an empty `request_id` is not stored."""

    store_id: StoreId
    request_id: RequestId
    fingerprint: bytes

    @property
    def request_keys(self) -> tuple[RequestKey, ...]:
        """The key of the request, or an empty tuple if it has no request id."""
        return (RequestKey(self.store_id, self.user_id, self.request_id),) if self.request_id else ()

    def earlier(self, unit: UnitOfWork) -> RequestRow | None:
        """Return the stored request with this id, or None if there is none.

        Raises:
            RequestIdReused: The earlier request had a different payload.
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
        """Return one of the user's conversations.

        Raises:
            ConversationNotFound: The user has no such conversation.
            ConversationErased: The user has erased the conversation.
        """
        conversation = unit.conversations.get(ConversationKey(self.store_id, conversation_id))
        if conversation is None or conversation.user_id != self.user_id:
            raise absent(conversation, self.user_id)
        return conversation


class UpdateConversation(ConversationRequest, frozen=True, kw_only=True):
    """Change a conversation's title, labels, archiving or sharing. An empty title restores the automatic title.

    Fields that are None change nothing. When other users lose write access, their open runs are stopped: their workers
    receive the command `cancel`. Undo runs (see `is_undo`) continue, so that no undo is left half done. Notices for
    other users are removed. The caller must stop other users' open jobs, whose results remain.
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
        conversations = (ConversationKey(self.store_id, self.conversation_id),)
        stopped = ((*conversations, self.user_id),) if self.ends_writing else ()
        return RowKeys(requests=self.request_keys, conversations=conversations, stopped=stopped)

    @property
    def changes(self) -> dict[str, Any]:
        asked = {name: getattr(self, name) for name in ("title", "archived", "labels", "sharing", "shows_arguments")}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def ends_writing(self) -> bool:
        """True if other users lose the right to write to the conversation, or never had it."""
        return self.sharing not in {None, Sharing.WRITE}

    def apply(self, unit: UnitOfWork) -> ConversationRow:
        """Change the conversation and return it.

        A repeated request has no effect.

        Raises:
            RequestIdReused: The request id was used with a different payload.
            ConversationNotFound: The user has no such conversation.
            ConversationErased: The user has erased the conversation.
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
        # The active run is stopped last, so that its end does not activate a run that is being stopped.
        for run_id in (*changed.queue, changed.active_run_id or RunId("")):
            run = unit.runs.get(RunKey(self.store_id, run_id))
            if run is not None and run.user_id != self.user_id and not self.is_undo(run.options):
                stop.command(unit, run, StopCause.USER, self.cancel, user_id=self.user_id)
        return unit.conversations.get(changed.key) or changed


# Maximum number of attempts to have a model write a conversation's title.
ATTEMPTS_MAX: Final = 3
# Only this much of the message, the answer and the model's reply is used.
TEXT_CHARACTERS_MAX: Final = 4096
_LINES_MAX: Final = 100
_AROUND: Final = " \"'`*_#“”„«»‘’「」"  # noqa: RUF001  # quotes of several languages
_THOUGHT: Final = "</think>"


def ask(unit: UnitOfWork, run: RunRow) -> None:
    """Request a title for the conversation of `run`, which has produced its answer.

    Each conversation gets at most one request, and none if the user has set a title. Conversations of delegated runs
    get no title. Other users' runs do not request one, because the title would contain those users' text.
    """
    conversation = unit.conversation_of(run)
    is_known = conversation.title or conversation.title_run_id or conversation.parent_run_id
    if not is_known and run.user_id == conversation.user_id:
        unit.put_conversation(replace(conversation, title_at=unit.now, title_run_id=run.run_id))


def title_in_reply(text: str) -> str:
    """Return the title in a model's reply: its first line without quotes, at most 80 characters."""
    for line in text[:TEXT_CHARACTERS_MAX].rpartition(_THOUGHT)[2].splitlines()[:_LINES_MAX]:
        title = made_title(line).strip(_AROUND)
        if title:
            return title
    return ""
