"""Types of asynchronous stubs. They exist only for the type checker, so they are Any at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub
    from pawl.agent.v1.goal_pb2_grpc import GoalServiceAsyncStub
    from pawl.agent.v1.jobs_pb2_grpc import JobServiceAsyncStub
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub
    from pawl.agent.v1.workflow_pb2_grpc import WorkflowServiceAsyncStub
    from pawl.identity.v1.key_pb2_grpc import KeyServiceAsyncStub
    from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceAsyncStub
    from pawl.job.v1.ledger_pb2_grpc import LedgerServiceAsyncStub
    from pawl.job.v1.workflows_pb2_grpc import WorkflowLedgerServiceAsyncStub
    from pawl.notify.v1.channel_pb2_grpc import ChannelServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub
    from pawl.notify.v1.preference_pb2_grpc import PreferenceServiceAsyncStub
    from pawl.tool.v1.audit_pb2_grpc import AuditServiceAsyncStub
    from pawl.tool.v1.completion_pb2_grpc import CompletionServiceAsyncStub
    from pawl.tool.v1.document_pb2_grpc import DocumentServiceAsyncStub
    from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceAsyncStub
    from pawl.tool.v1.file_pb2_grpc import FileServiceAsyncStub
    from pawl.tool.v1.memory_pb2_grpc import MemoryServiceAsyncStub
    from pawl.tool.v1.rule_pb2_grpc import RuleServiceAsyncStub
    from pawl.tool.v1.source_pb2_grpc import SourceServiceAsyncStub
    from pawl.tool.v1.tool_pb2_grpc import ToolServiceAsyncStub

__all__ = [
    "AgentLedgerServiceAsyncStub",
    "AgentRegistryServiceAsyncStub",
    "AgentServiceAsyncStub",
    "AuditServiceAsyncStub",
    "ChannelServiceAsyncStub",
    "CompletionServiceAsyncStub",
    "ConversationServiceAsyncStub",
    "DocumentServiceAsyncStub",
    "ExecutionServiceAsyncStub",
    "FileServiceAsyncStub",
    "GoalServiceAsyncStub",
    "JobServiceAsyncStub",
    "KeyServiceAsyncStub",
    "LedgerServiceAsyncStub",
    "MemoryServiceAsyncStub",
    "NotifyServiceAsyncStub",
    "OperatorServiceAsyncStub",
    "PreferenceServiceAsyncStub",
    "RuleServiceAsyncStub",
    "SourceServiceAsyncStub",
    "ToolServiceAsyncStub",
    "WorkflowLedgerServiceAsyncStub",
    "WorkflowServiceAsyncStub",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return Any
    raise AttributeError(name)
