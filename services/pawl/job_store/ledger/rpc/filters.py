"""Converts list requests to filters."""

from __future__ import annotations

from pawl.agent.v1 import agent_pb2
from pawl.chassis.ids import CommandId, ConversationId, RunId, UserId, check_agent_name, check_id
from pawl.chassis.labels import check_labels
from pawl.errors import InvalidField
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.reading import PendingFilter, RunFilter
from pawl.job_store.ledger.rpc.fields import enum_member, wait_kinds
from pawl.job_store.ledger.rpc.messages import optional_moment
from pawl.job_store.ledger.rules import labels
from pawl.values import CallState, RunState


def pending_filter(request: ledger_pb2.ListPendingCallsRequest) -> PendingFilter:
    conversation_id = check_id(request.conversation_id, "conversation_id", optional=True)
    if conversation_id and request.of_all_users:
        raise InvalidField("conversation_id cannot be combined with of_all_users", field="conversation_id")
    return PendingFilter(
        user_id=UserId("") if request.of_all_users else check_id(request.user_id, "user_id"),
        approves=request.approves,
        states=tuple(sorted({enum_member(CallState, state, "states") for state in request.states})),
        tool_name=request.tool_name,
        conversation_id=conversation_id,
    )


def run_filter(request: agent_pb2.ListRunsRequest) -> RunFilter:
    if request.order not in agent_pb2.RunOrder.values():
        raise InvalidField("order has an unknown value", field="order")
    waits, states = wait_kinds(request.waits), _states(request)
    if waits and states and RunState.WAITING not in states:
        raise InvalidField("only WAITING runs have waits: leave `states` empty", field="waits")
    return RunFilter(
        conversation_id=check_id(request.conversation_id, "conversation_id", optional=True),
        states=states,
        oldest_first=request.order == agent_pb2.RUN_ORDER_OLDEST_FIRST,
        create_time_from=optional_moment(request, "create_time_from"),
        create_time_before=optional_moment(request, "create_time_before"),
        waits=waits,
        parent_run_id=RunId(check_id(request.parent_run_id, "parent_run_id", optional=True)),
        agent_name=check_agent_name(request.agent, "agent", optional=True),
        labels=tuple(
            sorted(
                (
                    check_labels(request.labels)
                    | labels.of_workflow(check_id(request.workflow, "workflow", optional=True))
                    | labels.of_goal(is_goal=request.goals_only)
                ).items()
            )
        ),
    )


def job_filter(request: ledger_pb2.ListJobsRequest) -> RunFilter:
    stopped_by = CommandId(check_id(request.stopped_by_command_id, "stopped_by_command_id", optional=True))
    if request.running_jobs_of_store:
        if request.user_id:
            raise InvalidField("user_id cannot be combined with running_jobs_of_store", field="user_id")
        return RunFilter(running_jobs_of_store=True, stopped_by=stopped_by)
    reports_to = ConversationId(
        check_id(request.reports_to_conversation_id, "reports_to_conversation_id", optional=True)
    )
    if stopped_by and not reports_to:
        raise InvalidField(
            "stopped_by_command_id requires reports_to_conversation_id or running_jobs_of_store",
            field="stopped_by_command_id",
        )
    return RunFilter(
        states=_states(request),
        parent_run_id=RunId(check_id(request.parent_run_id, "parent_run_id", optional=True)),
        reports_to=reports_to,
        jobs_only=True,
        stopped_by=stopped_by,
    )


def _states(request: agent_pb2.ListRunsRequest | ledger_pb2.ListJobsRequest) -> tuple[RunState, ...]:
    return tuple(sorted({enum_member(RunState, state, "states") for state in request.states}))
