from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pawl.agent.v1 import agent_pb2, steps_pb2, types_pb2, whoami_pb2
from pawl.agent.v1 import conversation_pb2 as requests_pb2
from pawl.client.decisions import check_taken, checked
from pawl.client.forms import natural, parts_of, read_file
from pawl.client.goals import GoalVerbs
from pawl.client.history import Sent, chat_messages, history
from pawl.client.jobs import JobVerbs
from pawl.client.session import AsyncSession, definitions_of
from pawl.client.streams import responses
from pawl.client.target import DEADLINE_SECONDS
from pawl.client.text import Piece, TextReader
from pawl.client.triggers import TriggerVerbs
from pawl.client.usage import UsageVerbs
from pawl.client.workflows import WorkflowVerbs
from pawl.errors import InvalidField, PawlError, TooLarge
from pawl.event.v1 import call_pb2, conversation_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.tool.v1 import document_pb2

if TYPE_CHECKING:
    from pawl.tools import Tool

# Final run states.
ENDED: Final = frozenset(
    {
        run_pb2.RUN_STATE_COMPLETED,
        run_pb2.RUN_STATE_FAILED,
        run_pb2.RUN_STATE_CANCELLED,
        run_pb2.RUN_STATE_EXPIRED,
    }
)
_RESTING: Final = ENDED | {run_pb2.RUN_STATE_WAITING, run_pb2.RUN_STATE_NEEDS_ATTENTION}
_CONFIRM_SECONDS: Final = 2.0
_BATCH: Final = 64
_ERASURE_SECONDS: Final = 1.0
_TEXT_BYTES_MAX: Final = 1024 * 1024

# A pending call, or a run waiting for tokens.
Item: TypeAlias = call_pb2.Call | run_pb2.Run


class AsyncClient(TriggerVerbs, JobVerbs, WorkflowVerbs, GoalVerbs, UsageVerbs):
    """The asyncio client. `Target` describes the addresses, keys and retries.

    Methods raise exceptions from pawl.errors. Each request gets a new `request_id` unless you pass one. For at least 24
    hours, requests with the same `request_id` take effect only once, even from another process.
    """

    async def whoami(self) -> whoami_pb2.WhoAmIResponse:
        """Return your identity, your permissions and the deployment's features."""
        return await self.again(self.agents.WhoAmI, whoami_pb2.WhoAmIRequest())

    async def start(
        self,
        text: str = "",
        *,
        parts: Sequence[message_pb2.Part | str] = (),
        conversation_id: str = "",
        conversation_key: str = "",
        agent: str = "",
        labels: Mapping[str, str] | None = None,
        options: run_pb2.RunOptions | None = None,
        policy: types_pb2.MessagePolicy.ValueType = types_pb2.MESSAGE_POLICY_UNSPECIFIED,
        request_id: str = "",
        tools: Sequence[Tool[..., Any]] = (),
    ) -> run_pb2.Run:
        """Start a run and return once it is durable. The run continues even if the client disconnects.

        The run starts in the conversation with the given id or key, or in a new one. If no conversation has the key,
        one is created. `parts` are added after the message's text: `image(...)`, `file(...)` and more text. `tools` are
        front-end tools for this run only. Their calls wait until you call `submit`, or until a session with tools of
        these names attaches to the run.
        """
        request = agent_pb2.StartRunRequest(
            conversation_id=conversation_id,
            conversation_key=conversation_key,
            text=text,
            parts=parts_of(parts),
            agent=agent,
            labels=labels,
            options=options,
            policy=policy,
            request_id=request_id,
            front_end_tools=definitions_of(tools),
        )
        return (await self.once(self.agents.StartRun, request)).run

    async def send(
        self,
        conversation_id: str,
        text: str = "",
        *,
        parts: Sequence[message_pb2.Part | str] = (),
        agent: str = "",
        labels: Mapping[str, str] | None = None,
        options: run_pb2.RunOptions | None = None,
        policy: types_pb2.MessagePolicy.ValueType = types_pb2.MESSAGE_POLICY_UNSPECIFIED,
        request_id: str = "",
    ) -> Sent:
        """Send a message to a conversation. `policy` determines what happens if a run is active."""
        request = agent_pb2.SendMessageRequest(
            conversation_id=conversation_id,
            text=text,
            parts=parts_of(parts),
            agent=agent,
            labels=labels,
            options=options,
            policy=policy,
            request_id=request_id,
        )
        return Sent(await self.once(self.agents.SendMessage, request))

    async def cancel(self, run_id: str, reason: str = "", *, jobs: bool = False, request_id: str = "") -> run_pb2.Run:
        """Cancel a run and return it. With `jobs`, also cancel its jobs. A run that has ended does not change."""
        request = agent_pb2.CancelRunRequest(run_id=run_id, reason=reason, cancel_jobs=jobs, request_id=request_id)
        return (await self.once(self.agents.CancelRun, request)).run

    async def top_up(self, run_id: str, tokens: int, *, request_id: str = "") -> run_pb2.Run:
        """Add tokens to a run's budget and return the run."""
        request = agent_pb2.TopUpRunRequest(run_id=run_id, tokens=natural(tokens, "tokens"), request_id=request_id)
        return (await self.once(self.agents.TopUpRun, request)).run

    async def get(self, run_id: str, *, wait_seconds: float = 0.0, after_seq: int = 0) -> run_pb2.Run:
        """Return a run with its open calls.

        With `wait_seconds` (at most 50), wait up to that long until the run needs input or has ended. If it already
        needs input, pass its `last_seq` as `after_seq` to wait for the next change.
        """
        after_seq = natural(after_seq, "after_seq")
        request = agent_pb2.GetRunRequest(run_id=run_id, wait_seconds=wait_seconds, after_seq=after_seq)
        read: Any = self.agents.GetRun
        if wait_seconds:
            read = partial(read, timeout=DEADLINE_SECONDS + wait_seconds)
        response: agent_pb2.GetRunResponse = await self.again(read, request)
        return response.run

    async def result(self, run_id: str) -> run_pb2.Run:
        """Wait until a run has ended. Return it with `output_text` or, if it failed, with `failure`.

        This also waits while the run is waiting for a user. `get` and `pending` show what it is waiting for.
        """
        run = await self.get(run_id)
        while run.state not in ENDED:
            async with aclosing(self.watch(run_id, run.last_seq)) as events:
                async for _ in events:
                    pass
            run = await self.get(run_id)
        return run

    async def watch(self, run_id: str, after_seq: int = 0) -> AsyncGenerator[event_pb2.RunEvent | gap_pb2.Gap, None]:
        """Yield each of a run's events after `after_seq` once, until the run ends.

        A gap replaces events that are no longer stored. If the connection is lost, the stream continues with any
        replica, after the last event seen. Reading the next event marks the previous one as seen. Pawl sends no delayed
        notifications about seen events.
        """
        after_seq = natural(after_seq, "after_seq")

        def open_stream() -> Any:
            return self.agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id, after_seq=after_seq))

        async with aclosing(responses(open_stream, ends=True, retry_seconds=self.retry_seconds)) as stream:
            async for response in stream:
                for event in response.events:
                    after_seq = event.seq
                    yield event
                    if event.run_changed.run.state in _RESTING:
                        with suppress(PawlError):
                            seen = agent_pb2.GetRunRequest(run_id=run_id, after_seq=after_seq)
                            await self.agents.GetRun(seen, timeout=_CONFIRM_SECONDS)
                if response.HasField("gap"):
                    after_seq = response.gap.to_seq
                    yield response.gap

    async def text(self, run_id: str, after_seq: int = 0) -> AsyncGenerator[Piece, None]:
        """Yield the model's text as it is written, until the run ends.

        A piece may replace earlier text (`Piece.takes_back`). `after_seq` is the `seq` of the last piece that you have.
        Only later pieces are yielded. If events after `after_seq` are no longer stored, the first piece is the whole
        text so far.
        """
        reader, after_seq = TextReader(), natural(after_seq, "after_seq")
        async with aclosing(self.watch(run_id)) as events:
            async for event in events:
                if (piece := reader.take(event)) is not None and piece.seq > after_seq:
                    yield piece

    async def runs(
        self,
        *,
        conversation_id: str = "",
        states: Iterable[run_pb2.RunState.ValueType] = (),
        waits: Iterable[run_pb2.WaitKind.ValueType] = (),
        parent_run_id: str = "",
        agent: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[run_pb2.Run, None]:
        """Yield your runs that match all filters and labels, newest first."""
        request = agent_pb2.ListRunsRequest(
            conversation_id=conversation_id,
            states=states,
            waits=waits,
            parent_run_id=parent_run_id,
            agent=agent,
            labels=labels,
        )
        async for page in self.pages(self.agents.ListRuns, request):
            for run in page.runs:
                yield run

    async def calls(self, run_id: str) -> AsyncGenerator[call_pb2.Call, None]:
        """Yield a run's calls in order, with full results."""
        async for page in self.pages(self.agents.ListCalls, agent_pb2.ListCallsRequest(run_id=run_id)):
            for call in page.calls:
                yield call

    async def round(self, run_id: str, number: int) -> steps_pb2.GetRoundResponse:
        """Return the exact request and answer of one of a run's model calls. Rounds start at 1."""
        request = steps_pb2.GetRoundRequest(run_id=run_id, round=natural(number, "number"))
        return await self.again(self.agents.GetRound, request)

    async def messages(self, conversation_id: str) -> AsyncGenerator[message_pb2.Message, None]:
        """Yield a conversation's messages in order."""
        request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
        async for page in self.pages(self.agents.ListMessages, request):
            for message in page.messages:
                yield message

    async def list_conversations(
        self,
        query: str = "",
        *,
        archived: bool | None = None,
        shared: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[conversation_pb2.Conversation, None]:
        """Yield your conversations or, with `shared`, those that other users share. The most recent come first.

        The conversations match the words in `query` and have all of the `labels`. `labels` cannot be combined with
        `shared`. `archived=None` yields both archived and unarchived conversations.
        """
        request = requests_pb2.ListConversationsRequest(query=query, archived=archived, shared=shared, labels=labels)
        async for page in self.pages(self.conversations.ListConversations, request):
            for conversation in page.conversations:
                yield conversation

    async def get_conversation(
        self, conversation_id: str = "", *, conversation_key: str = ""
    ) -> conversation_pb2.Conversation:
        """Return a conversation by its id or its key."""
        request = requests_pb2.GetConversationRequest(
            conversation_id=conversation_id, conversation_key=conversation_key
        )
        return (await self.again(self.conversations.GetConversation, request)).conversation

    async def update_conversation(
        self,
        conversation_id: str,
        *,
        title: str | None = None,
        archived: bool | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> conversation_pb2.Conversation:
        """Change a conversation's title, archive state or labels. None leaves a value unchanged.

        An empty title restores the original one. `labels` replaces all existing labels.
        """
        request = requests_pb2.UpdateConversationRequest(
            conversation_id=conversation_id, title=title, archived=archived, request_id=request_id
        )
        if labels is not None:
            request.labels.CopyFrom(conversation_pb2.Labels(labels=labels))
        return (await self.once(self.conversations.UpdateConversation, request)).conversation

    async def fork(
        self, conversation_id: str, number: int = 0, *, request_id: str = ""
    ) -> conversation_pb2.Conversation:
        """Copy a conversation up to message `number` into a new one, and return the copy. Continue it with `send`.

        The message must be the end of an answer, and all its calls must have results. 0 means the last such message.
        """
        request = requests_pb2.ForkConversationRequest(
            conversation_id=conversation_id, number=natural(number, "number"), request_id=request_id
        )
        return (await self.once(self.conversations.ForkConversation, request)).conversation

    async def import_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        title: str = "",
        conversation_key: str = "",
        request_id: str = "",
    ) -> conversation_pb2.Conversation:
        """Create a conversation from a chat-completions history and return it. See `history`.

        Raises:
            InvalidHistory: A strict model server would reject the history. The message lists up to 20 errors.
        """
        request = requests_pb2.ImportConversationRequest(
            messages=history(messages), title=title, conversation_key=conversation_key, request_id=request_id
        )
        return (await self.once(self.conversations.ImportConversation, request)).conversation

    async def export_conversation(self, conversation_id: str) -> list[dict[str, Any]]:
        """Return a conversation as chat-completions messages, without other users' calls. See `chat_messages`."""
        request = requests_pb2.ExportConversationRequest(conversation_id=conversation_id)
        return [
            message
            async for page in self.pages(self.conversations.ExportConversation, request)
            for message in chat_messages(page.messages)
        ]

    async def share(
        self,
        conversation_id: str,
        *,
        shows_arguments: bool = False,
        write: bool = False,
        private: bool = False,
        request_id: str = "",
    ) -> conversation_pb2.Conversation:
        """Let all users of your store read a conversation, or make it private again.

        With `shows_arguments`, they can also see the conversation's calls. With `write`, they can send messages, which
        start their own runs in the conversation. Without `write`, open runs of other users in it are cancelled.
        `private` takes effect with the next request of each user.
        """
        sharing = conversation_pb2.SHARING_WRITE if write else conversation_pb2.SHARING_READ
        sharing = conversation_pb2.SHARING_PRIVATE if private else sharing
        request = requests_pb2.UpdateConversationRequest(
            conversation_id=conversation_id, sharing=sharing, shows_arguments=shows_arguments, request_id=request_id
        )
        return (await self.once(self.conversations.UpdateConversation, request)).conversation

    async def erase(self, conversation_id: str, *, wait: bool = False) -> conversation_pb2.Erasure:
        """Erase a conversation permanently. Return the progress. With `wait`, return once the erasure is complete.

        The erasure continues if the client disconnects. Call this again to get the progress.
        """
        request = requests_pb2.EraseConversationRequest(conversation_id=conversation_id, page_size=1)
        while True:
            erasure = (await self.again(self.conversations.EraseConversation, request)).erasure
            if erasure.HasField("end_time") or not wait:
                return erasure
            await asyncio.sleep(_ERASURE_SECONDS)

    async def left_calls(self, conversation_id: str) -> AsyncGenerator[conversation_pb2.LeftCall, None]:
        """Yield the calls of an erased conversation that had already started.

        Their tools may have received the arguments. The list is complete once the erasure has ended. If the
        conversation has not been erased yet, this erases it. See `erase`.
        """
        request = requests_pb2.EraseConversationRequest(conversation_id=conversation_id)
        async for page in self.pages(self.conversations.EraseConversation, request):
            for call in page.left_calls:
                yield call

    async def pending(self, wanted: agent_pb2.PendingFilter | None = None) -> AsyncGenerator[Item, None]:
        """Yield your pending items that match the filter: first calls, then runs short of tokens, each oldest first."""
        async for page in self.pages(self.agents.ListPending, agent_pb2.ListPendingRequest(filter=wanted)):
            for call in page.calls:
                yield call
            for run in page.runs:
                yield run

    async def watch_pending(
        self, wanted: agent_pb2.PendingFilter | None = None
    ) -> AsyncGenerator[Mapping[str, Item], None]:
        """Yield all pending items, keyed by call id or run id: once immediately, then after each change. Never ends."""
        waiting: dict[str, Item] = {}
        is_whole = False

        def open_stream() -> Any:
            nonlocal is_whole
            is_whole = False  # A new stream starts with all items.
            waiting.clear()
            return self.agents.WatchPending(agent_pb2.WatchPendingRequest(filter=wanted))

        async with aclosing(responses(open_stream, ends=False, retry_seconds=self.retry_seconds)) as stream:
            async for response in stream:
                waiting.update({call.call_id: call for call in response.calls})
                waiting.update({run.run_id: run for run in response.runs})
                for gone_id in [*response.gone_call_ids, *response.gone_run_ids]:
                    waiting.pop(gone_id, None)
                is_change = bool(response.ByteSize())  # An empty response is a heartbeat.
                is_whole = is_whole or response.complete
                if is_whole and is_change:
                    yield dict(waiting)

    async def decide(self, decision: types_pb2.CallDecision, *, request_id: str = "") -> run_pb2.Run:
        """Decide on a call, as in `decide(approve(call))`. See also `edit`, `reject` and `answer`.

        A decision is final, takes effect once, and applies to exactly the call that you read.
        """
        decision = checked(decision)
        request = agent_pb2.DecideRequest(run_id=decision.run_id, decision=decision, request_id=request_id)
        return (await self.once(self.agents.Decide, request)).run

    async def decide_all(self, decisions: Sequence[types_pb2.CallDecision]) -> list[types_pb2.Receipt]:
        """Decide on calls of several runs. Return a receipt for each. A refused decision does not affect the others."""
        decisions = [*map(checked, decisions)]
        receipts: list[types_pb2.Receipt] = []
        for start in range(0, len(decisions), _BATCH):
            request = agent_pb2.DecideCallsRequest(decisions=decisions[start : start + _BATCH])
            receipts += (await self.once(self.agents.DecideCalls, request)).receipts
        return receipts

    async def submit(self, result: types_pb2.ToolResult, *, request_id: str = "") -> run_pb2.Run:
        """Submit a front-end call's result without a session, as in `submit(result(call, value))`."""
        if not isinstance(result, types_pb2.ToolResult):
            raise InvalidField("submit requires a result: submit(result(call, value))", field="result")
        request = agent_pb2.SubmitToolResultsRequest(run_id=result.run_id, results=[result], request_id=request_id)
        response = await self.once(self.agents.SubmitToolResults, request)
        check_taken(response.receipts[0])
        return response.run

    def session(
        self,
        *,
        tools: Sequence[Tool[..., Any]] = (),
        client_id: str = "",
        calls_max: int = 4,
        addresses: Sequence[str] = (),
        on_connected: Callable[[str], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> AsyncSession:
        """Return a front-end session, which is an async context manager. See `AsyncSession`."""
        return AsyncSession(
            self,
            tools=tools,
            client_id=client_id,
            calls_max=calls_max,
            addresses=addresses,
            on_connected=on_connected,
            on_lost=on_lost,
        )

    async def documents(self) -> AsyncGenerator[document_pb2.Document, None]:
        """Yield your documents and the store's documents, sorted by name, without their text."""
        async for page in self.pages(self.document_store.ListDocuments, document_pb2.ListDocumentsRequest()):
            for document in page.documents:
                yield document

    async def get_document(self, name: str, *, shared: bool = False) -> document_pb2.GetDocumentResponse:
        """Return one of your documents or, with `shared`, one of the store's documents, with its text."""
        request = document_pb2.GetDocumentRequest(name=name, owner=_owner(shared=shared))
        return await self.again(self.document_store.GetDocument, request)

    async def put_document(
        self, name: str, text: str, *, language: str = "", shared: bool = False
    ) -> document_pb2.PutDocumentResponse:
        """Create or replace a document that the model can read.

        `language` sets the language for full-text search: simple, english, german and so on.
        """
        request = document_pb2.PutDocumentRequest(name=name, text=text, language=language, owner=_owner(shared=shared))
        return await self.again(self.document_store.PutDocument, request)

    async def upload(
        self, path: str | Path, *, name: str = "", language: str = "", shared: bool = False
    ) -> document_pb2.PutDocumentResponse:
        """Upload a text file as a document. Its name defaults to the file's name. See `put_document`.

        Raises:
            OSError: The file cannot be read.
            TooLarge: The file is over 1 MiB.
            InvalidField: The file is not UTF-8 text.
        """
        file = Path(path)
        text = await asyncio.to_thread(_read, file)
        return await self.put_document(name or file.name, text, language=language, shared=shared)

    async def delete_document(self, name: str, *, shared: bool = False) -> None:
        """Delete a document. This is not retried, because a second attempt would raise DocumentNotFound."""
        request = document_pb2.DeleteDocumentRequest(name=name, owner=_owner(shared=shared))
        await self.document_store.DeleteDocument(request)


def _owner(*, shared: bool) -> document_pb2.DocumentOwner.ValueType:
    return document_pb2.DOCUMENT_OWNER_STORE if shared else document_pb2.DOCUMENT_OWNER_USER


def _read(file: Path) -> str:
    content = read_file(file, _TEXT_BYTES_MAX + 1)
    if len(content) > _TEXT_BYTES_MAX:
        raise TooLarge(f"{file} is over {_TEXT_BYTES_MAX} bytes. Split it into several documents")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidField(f"{file} is not UTF-8 text. Convert it first", field="text") from None
