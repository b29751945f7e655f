"""Submits a user's message: creates a new run, or steers the active one (LOOP-1, LOOP-13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import DEFAULT_AGENT, ConversationId, RunId, RunKey
from pawl.errors import (
    ConversationBusy,
    FeatureOff,
    InvalidField,
    ModelNotAllowed,
    QueueFull,
    RunNotFound,
    RunOfAnotherUser,
    StorageFull,
    ToolExists,
    TooManyJobs,
)
from pawl.job_store.ledger.rules import delegation, inbox, jobs, stop, turn
from pawl.job_store.ledger.rules.conversations import ConversationRequest, absent
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.log import write
from pawl.job_store.ledger.rules.rows import (
    ClientKey,
    CommandRow,
    ConversationKey,
    ConversationRow,
    OwnTools,
    RunRow,
)
from pawl.job_store.ledger.rules.slots import QueueKey
from pawl.job_store.ledger.rules.states import RunProgram
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import Feature, MessagePolicy, RunState, StopCause

_ON_THE_ACTIVE: Final = frozenset({MessagePolicy.STEER, MessagePolicy.INTERRUPT})


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The run that was created or that the message entered.

    `queue_position` starts at 1. It is 0 if the run is not queued.
    """

    run: RunRow
    steered: bool
    queue_position: int = 0


class Submit(ConversationRequest, frozen=True, kw_only=True):
    """Submit `message` to a conversation.

    If `conversation_id` is empty, a new conversation is created, with the id `new_conversation_id` if that is set.
    `key_hash` is the hash of the client's conversation key, if the request has a key instead of an id. A new
    conversation gets the title `made_title`. An archived conversation is restored.

    The following are opaque: `message`, which enters the conversation; `steer` and `interrupt`, which are commands for
    the owner of the active run; and `options` of the new run. `text_bytes` is the size of the message's text.

    At most `queue_max` runs can be queued in the conversation, and at most `store_queue_max` runs can wait for one of
    the store's `store_slots` slots.

    Workflows and goals use a background slot, so the limits of background runs apply. With `is_reported`, the run has
    its own conversation, and its end is reported to the named conversation, like the end of a job.

    `undoes` is the run that the new run undoes. Writers may undo their own runs even after sharing has ended. With
    `only_repeat`, only a repeated request succeeds, for example because the agent no longer exists.

    The features in `off` are disabled in the store, and the store may not use the `refused_model`. If `is_full` is set,
    the store has reached its limit of stored bytes. None of this prevents an undo.
    """

    conversation_id: ConversationId
    conversation_must_exist: bool
    policy: MessagePolicy
    message: bytes
    steer: bytes
    interrupt: bytes
    options: bytes
    queue_max: int
    store_queue_max: int
    token_budget: int = 0
    token_ceiling: int = 0
    text_bytes: int = 0
    store_slots: int = 0
    inbox_limits: inbox.Limits = inbox.LIMITS
    key_hash: bytes = b""
    made_title: str = ""
    undoes: RunId = RunId("")
    agent_name: str = DEFAULT_AGENT
    labels: Mapping[str, str] = {}
    own_tools: OwnTools | None = None
    new_conversation_id: ConversationId = ConversationId("")
    only_repeat: bool = False
    program: RunProgram = RunProgram.DEFAULT
    off: frozenset[Feature] = frozenset()
    refused_model: str = ""
    is_full: bool = False
    is_reported: bool = False
    traceparent: str = ""

    @property
    def row_keys(self) -> RowKeys:
        conversation = ConversationKey(self.store_id, self.conversation_id)
        return RowKeys(
            requests=self.request_keys,
            conversations=(conversation,) if self.conversation_id else (),
            keyed=(self._client_key,) if self.key_hash else (),
            runs=(RunKey(self.store_id, self.undoes),) if self.undoes else (),
            queues=(
                (QueueKey(self.store_id, in_background=bool(self.program)), self.store_queue_max, self.store_slots),
            ),
        )

    def apply(self, unit: UnitOfWork) -> Submitted:
        """Create or steer a run.

        A repeated request returns the same run.

        Raises:
            RequestIdReused: The request id was used with a different payload.
            ToolExists: `only_repeat` is set and the request was not made before.
            InvalidField: The message supplies tools, and the policy is STEER.
            ConversationNotFound: The user has no such conversation, and none is shared with the user for writing.
            ConversationErased: The user has erased the conversation.
            ConversationBusy: The policy is REJECT and a run is active.
            RunOfAnotherUser: The policy is STEER or INTERRUPT, and another user started the active run.
            FeatureOff: The request creates a run, and a feature that it needs is disabled.
            ModelNotAllowed: The request creates a run, and the store may not use its model.
            StorageFull: The request creates a run, and the store has reached its limit of stored bytes.
            QueueFull: Too many runs are waiting in the conversation or the store, or the active run has too many
                messages or messages from too many people.
        """
        earlier = self.earlier(unit)
        if earlier is not None:
            run = unit.runs.get(RunKey(self.store_id, earlier.run_id))
            if run is None:
                raise RunNotFound
            return _placed(unit, Submitted(run=run, steered=earlier.steered))
        if self.only_repeat:
            raise ToolExists
        if self.own_tools is not None and self.policy is MessagePolicy.STEER:
            raise InvalidField("tools require a new run: the policy cannot be STEER", field="policy")
        conversation = self._conversation(unit)
        submitted = self._deliver(unit, conversation)
        self.remember(unit, run_id=submitted.run.run_id, steered=submitted.steered)
        return _placed(unit, submitted)

    @property
    def _client_key(self) -> ClientKey:
        return ClientKey(self.store_id, self.user_id, self.key_hash)

    def _conversation(self, unit: UnitOfWork) -> ConversationRow:
        if self.key_hash:
            found = unit.conversation_with(self._client_key)
        else:
            key = ConversationKey(self.store_id, self.conversation_id)
            found = unit.conversations.get(key) if self.conversation_id else None
        if found is not None and found.user_id == self.user_id:
            return unit.put_conversation(replace(found, archived=False)) if found.archived else found
        if found is not None and (found.takes_messages_of(self.user_id) or self._undoes_own(unit, found)):
            return found
        if found is not None or (self.conversation_id and self.conversation_must_exist):
            raise absent(found, self.user_id)
        return unit.put_conversation(
            ConversationRow(
                store_id=self.store_id,
                conversation_id=self.conversation_id
                or self.new_conversation_id
                or ConversationId(unit.ids.new("conv")),
                user_id=self.user_id,
                create_time=unit.now,
                update_time=unit.now,
                key_hash=self.key_hash or None,
                made_title=self.made_title,
            )
        )

    def _undoes_own(self, unit: UnitOfWork, conversation: ConversationRow) -> bool:
        undone = unit.runs.get(RunKey(self.store_id, self.undoes)) if self.undoes else None
        is_erased = not conversation.user_id
        return (
            undone is not None
            and not is_erased
            and (undone.user_id, undone.conversation_id) == (self.user_id, conversation.conversation_id)
        )

    def _deliver(self, unit: UnitOfWork, conversation: ConversationRow) -> Submitted:
        if self.is_reported:
            return self.start_reported(unit, conversation, RunId(unit.ids.new("run")), self.options, is_silent=False)
        active_id = conversation.active_run_id
        active = unit.runs.get(RunKey(self.store_id, active_id)) if active_id else None
        if active is None:
            return self._create(unit, conversation)
        is_own = active.user_id == self.user_id
        if self.policy in _ON_THE_ACTIVE and not is_own:
            raise RunOfAnotherUser
        if active.is_turn and (is_own or active.is_quarantined):
            return self._instead_of(unit, conversation, active)
        match self.policy:
            case MessagePolicy.REJECT:
                raise ConversationBusy
            case MessagePolicy.QUEUE:
                return self._create(unit, conversation)
            case MessagePolicy.STEER:
                if active.is_stopping or active.program is RunProgram.WORKFLOW:
                    # A run that is being stopped would lose the message, and workflow runs read no messages.
                    return self._create(unit, conversation)
                incoming = self._command(unit, active, inbox.STEER, self.steer)
                active = inbox.accept_message(
                    unit, active, incoming, self.inbox_limits, text_bytes=self.text_bytes, people=self.people
                )
                return Submitted(run=turn.wake(unit, active), steered=True)
            case MessagePolicy.INTERRUPT:
                submitted = self._create(unit, conversation, first=True)
                if active.state is not RunState.CANCELLING:
                    active = inbox.accept(unit, active, self._command(unit, active, inbox.CANCEL, self.interrupt))
                    stop.request(unit, active, StopCause.SUPERSEDED)
                return replace(submitted, run=unit.runs.get(submitted.run.key) or submitted.run)
            case _:
                assert_never(self.policy)

    def _instead_of(self, unit: UnitOfWork, conversation: ConversationRow, active: RunRow) -> Submitted:
        """Queue a run behind the active turn, which was started by notices and cannot be steered.

        Normally, the turn ends first. It is stopped if it has not started, is waiting or needs attention, or if the
        policy is INTERRUPT. A turn that needs attention would block everyone, so any user can replace it.

        Raises:
            ConversationBusy: The policy is REJECT, and other runs are queued.
        """
        if self.policy is MessagePolicy.REJECT and conversation.queue:
            raise ConversationBusy
        interrupts = self.policy is MessagePolicy.INTERRUPT
        submitted = self._create(unit, conversation, first=interrupts)
        is_to_end = interrupts or active.state in {RunState.WAITING, RunState.NEEDS_ATTENTION}
        if (is_to_end or not jobs.has_started(active)) and not active.is_stopping:
            stop.command(unit, active, StopCause.SUPERSEDED, self.interrupt)
        return replace(submitted, run=unit.runs.get(submitted.run.key) or submitted.run)

    def _create(self, unit: UnitOfWork, conversation: ConversationRow, *, first: bool = False) -> Submitted:
        self.check_on()
        is_own = conversation.user_id == self.user_id
        # Half of the queue is reserved for the owner of the conversation. Other writers cannot jump the queue.
        first = first and is_own
        queue_max = self.queue_max if is_own else (self.queue_max + 1) // 2
        if len(conversation.queue) >= queue_max:
            raise QueueFull(f"{queue_max} messages are already waiting in this conversation: try again later")
        self.check_queue(unit, in_background=bool(self.program))
        budget = (self.token_budget, self.token_ceiling)
        run = turn.queued(conversation, RunId(unit.ids.new("run")), self.message, self.options, budget, now=unit.now)
        run = self.signed(run)
        if self.own_tools is not None:
            run = replace(run, own_tools=self.own_tools)
        created = RunChanged(from_state=None, run=run)
        if conversation.active_run_id is None:
            return Submitted(run=turn.give(unit, conversation, run, before=(created,)), steered=False)
        queue, interrupting = conversation.queue, conversation.interrupting
        index = sum(waiting in interrupting for waiting in queue) if first else len(queue)
        queue = (*queue[:index], run.run_id, *queue[index:])
        interrupting = (*interrupting, run.run_id) if first else interrupting
        unit.put_conversation(replace(conversation, queue=queue, interrupting=interrupting, update_time=unit.now))
        return Submitted(run=write(unit, run, [created]), steered=False)

    def start_reported(
        self, unit: UnitOfWork, conversation: ConversationRow, run_id: RunId, options: bytes, *, is_silent: bool
    ) -> Submitted:
        """Create a run in its own conversation, and count it as an open job of `conversation`.

        Raises:
            FeatureOff: Runs or background work are disabled.
            TooManyJobs: The user has too many open jobs in the conversation.
            QueueFull: Too many background runs are waiting in the store.
        """
        self.check_on()
        if conversation.background.open_jobs_of(self.user_id) >= jobs.OPEN_MAX:
            raise TooManyJobs
        self.check_queue(unit, in_background=True)
        conversation = jobs.add_open_job(unit, conversation, run_id, self.user_id)
        # The parent run keeps the conversation out of all lists, as for delegated runs.
        own = delegation.own_conversation(
            unit, conversation.key, user_id=self.user_id, made_title=self.made_title, parent_run_id=run_id
        )
        budget = (self.token_budget, self.token_ceiling)
        run = self.signed(turn.queued(own, run_id, self.message, options, budget, now=unit.now))
        run = replace(run, reports_to=conversation.conversation_id, in_background=True, silent=is_silent)
        return Submitted(run=turn.give(unit, own, run, before=(RunChanged(from_state=None, run=run),)), steered=False)

    @property
    def needed(self) -> Sequence[Feature]:
        """Features that a new run needs. An undo needs none."""
        if self.undoes:
            return ()
        if self.program:
            return (Feature.RUNS, Feature.BACKGROUND, Feature.DELEGATION)
        return (Feature.RUNS, Feature.BACKGROUND) if self.is_reported else (Feature.RUNS,)

    def is_refused(self, *more: Feature) -> bool:
        """Return whether `check_on` raises an error."""
        is_off = not self.off.isdisjoint({*more, *self.needed})
        return is_off or (not self.undoes and (self.is_full or bool(self.refused_model)))

    def check_on(self, *more: Feature) -> None:
        """Check that the features in `more`, and the features that a new run needs, are enabled.

        Raises:
            FeatureOff: One of them is disabled.
            ModelNotAllowed: The store may not use the run's model.
            StorageFull: The store has reached its limit of stored bytes.
        """
        for feature in (*more, *self.needed):
            if feature in self.off:
                raise FeatureOff(f"the feature '{feature}' is switched off for this store", feature=feature)
        if self.refused_model and not self.undoes:
            raise ModelNotAllowed(f"this store may not use the model {self.refused_model!r}", model=self.refused_model)
        if self.is_full and not self.undoes:
            raise StorageFull

    def check_queue(self, unit: UnitOfWork, *, in_background: bool = False) -> None:
        """Raise an error if too many runs are already waiting for the store's slots.

        Raises:
            QueueFull: Too many runs are waiting.
        """
        of_store = unit.queues.get(QueueKey(self.store_id, in_background=in_background))
        if of_store is None or of_store.waiting < self.store_queue_max:
            return
        waiting, way = ("jobs", "stop some, or try") if in_background else ("runs", "try")
        raise QueueFull(f"{self.store_queue_max} {waiting} are already waiting in this store: {way} again later")

    def signed(self, run: RunRow) -> RunRow:
        return replace(
            run,
            user_id=self.user_id,
            credential_id=self.credential_id,
            delegate_user_id=self.delegate_user_id,
            people=self.people,
            agent_name=self.agent_name,
            labels=self.labels,
            program=self.program,
            in_background=bool(self.program),
            trace=self.traceparent,
        )

    def _command(self, unit: UnitOfWork, run: RunRow, name: str, payload: bytes) -> CommandRow:
        return inbox.arrived(
            unit,
            run,
            name=name,
            payload=payload,
            user_id=self.user_id,
            fingerprint=self.fingerprint,
            credential_id=self.credential_id,
            delegate_user_id=self.delegate_user_id,
        )


def _placed(unit: UnitOfWork, submitted: Submitted) -> Submitted:
    run = submitted.run
    conversation = unit.conversations.get(ConversationKey(run.store_id, run.conversation_id))
    if conversation is None or run.run_id not in conversation.queue:
        return submitted
    return replace(submitted, queue_position=conversation.queue.index(run.run_id) + 1)
