"""The lists of pawl.agent.v1 that agent-loop forwards: runs, calls, messages, and runs that need attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from datetime import datetime
from typing import Any

from pawl.agent.v1 import agent_pb2 as pb
from pawl.agent.v1 import operator_pb2
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import RunKey, StoreId, UserId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.event.v1 import run_pb2
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.pages import Id, Large, Small, make_token, next_token, page_size, read_token
from pawl.job_store.ledger.reading import RunFilter, RunView
from pawl.job_store.ledger.rpc import filters, messages
from pawl.job_store.ledger.rules.waiting import explain


async def list_runs(
    ledger: Ledger, store_id: StoreId, user_id: UserId, wanted: RunFilter, request: Any
) -> tuple[Iterable[run_pb2.Run], str]:
    """Return the page of runs that `request` asks for, and the token of the next one."""
    selection = (store_id, user_id, *astuple(wanted))
    page = await ledger.reads.runs(
        store_id,
        user_id,
        wanted,
        after=read_token(request.page_token, "ListRuns", selection, tuple[datetime, Id]),
        rows_max=page_size(request.page_size),
    )
    token = next_token("ListRuns", selection, page, lambda each: (each.run.create_time, each.run.run_id))
    return (messages.run_in(each, explain(each, ledger.limits.places)) for each in page.rows), token


class ListServicer:
    """Serves the user for whom agent-loop calls."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        user, wanted = require_user(), filters.run_filter(request)
        runs, token = await list_runs(self._ledger, user.store_id, user.user_id, wanted, request)
        return pb.ListRunsResponse(runs=runs, next_page_token=token)

    async def ListCalls(self, request: pb.ListCallsRequest, context: Context) -> pb.ListCallsResponse:
        user, run_id = require_user(), check_id(request.run_id, "run_id")
        selection = (user.store_id, user.user_id, run_id)
        page = await self._ledger.reads.calls(
            RunKey(user.store_id, run_id),
            user.user_id,
            after=read_token(request.page_token, "ListCalls", selection, tuple[Small, Small, Id]),
            rows_max=page_size(request.page_size),
        )
        token = next_token("ListCalls", selection, page, lambda call: (call.round, call.index, call.call_id))
        is_own = all(row.user_id == user.user_id for row in page.rows)
        shown = map(messages.call if is_own else messages.call_for_reader, page.rows)
        return pb.ListCallsResponse(calls=shown, next_page_token=token)

    async def ListMessages(self, request: pb.ListMessagesRequest, context: Context) -> pb.ListMessagesResponse:
        user, conversation_id = require_user(), check_id(request.conversation_id, "conversation_id")
        selection = (user.store_id, user.user_id, conversation_id)
        page = await self._ledger.reads.messages(
            user.store_id,
            user.user_id,
            conversation_id,
            after=(read_token(request.page_token, "ListMessages", selection, tuple[Large]) or (0,))[0],
            rows_max=page_size(request.page_size),
        )
        token = next_token("ListMessages", selection, page, lambda message: (message.number,))
        shown = (messages.message_for(row, page.user_id, user.user_id) for row in page.rows)
        return pb.ListMessagesResponse(messages=shown, next_page_token=token)

    async def ListAttention(
        self, request: operator_pb2.ListAttentionRequest, context: Context
    ) -> operator_pb2.ListAttentionResponse:
        user, run_id = require_user(), check_id(request.run_id, "run_id", optional=True)
        selection = (user.store_id, run_id)
        page = await self._ledger.attention_repository.listed(
            user.store_id,
            run_id=run_id,
            after=read_token(request.page_token, "ListAttention", selection, tuple[datetime, Id]),
            rows_max=page_size(request.page_size),
        )
        response = operator_pb2.ListAttentionResponse(runs=map(_run_in_need, page.rows))
        if page.has_more and (last := page.rows[-1].run).attention is not None:
            position = (last.attention.since_time, last.run_id)
            response.next_page_token = make_token("ListAttention", selection, position)
        return response


def _run_in_need(view: RunView) -> operator_pb2.RunInNeed:
    run = messages.run(view.run)
    return operator_pb2.RunInNeed(
        run_id=run.run_id,
        user_id=run.user_id,
        conversation_id=run.conversation_id,
        attention=run.attention,
        crash_count=run.crash_count,
        round=run.round,
        stop_cause=run.stop_cause,
        calls=map(messages.call, view.pending),
    )
