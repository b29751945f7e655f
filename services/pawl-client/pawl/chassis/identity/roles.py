"""Roles, and a table of which callers may call which method."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """A role of a credential. A credential with several roles has the rights of all of them."""

    # Read-only.
    VIEWER = "viewer"
    # Starts runs and steers its own. Credentials without roles have the rights of a member.
    MEMBER = "member"
    # A member who also decides on the whole store's gated calls.
    APPROVER = "approver"
    # An approver who also manages the store's agents, tools, rules and documents.
    ADMIN = "admin"
    # A member who also repairs the store's runs, reads its audit log and manages its keys.
    OPERATOR = "operator"
    # A program that runs the store's tools.
    WORKER = "worker"
    # A program that acts for the store's users with its other roles.
    DELEGATE = "delegate"
    # A program that only delivers webhooks, tool results and e-mail events from outside to the store.
    GATEWAY = "gateway"
    # Manages all stores' keys. It has no store and cannot read any content.
    DEPLOYMENT = "deployment"


ROLES: Final = frozenset(Role)
ROLES_OF_A_STORE: Final = ROLES - {Role.DEPLOYMENT}
# The error for roles that grant no rights.
OWN_ROLES_GO_BESIDE: Final = "custom roles must be combined with at least one of " + ", ".join(
    role for role in Role if role is not Role.DEPLOYMENT
)
# Roles that decide on the gated calls of all users in their store.
APPROVERS: Final = frozenset({Role.APPROVER, Role.ADMIN})
# Prefix of callers that are services.
SERVICE: Final = "service:"
AGENT_LOOP: Final = f"{SERVICE}agent-loop"
TOOL_REGISTRY: Final = f"{SERVICE}tool-registry"
NOTIFIER: Final = f"{SERVICE}notifier"
MAILBOX: Final = f"{SERVICE}mailbox"
# The gateway only relays calls, each with its own credential.
GATEWAY: Final = f"{SERVICE}gateway"

_MEMBERS: Final = frozenset({Role.MEMBER, Role.APPROVER, Role.ADMIN, Role.OPERATOR})
# Roles for users; each of them can read.
READERS: Final = _MEMBERS | {Role.VIEWER}
_OPERATORS: Final = frozenset({Role.ADMIN, Role.OPERATOR})
ANYBODY: Final = ROLES | {AGENT_LOOP, TOOL_REGISTRY, NOTIFIER, MAILBOX, GATEWAY}

_TABLE: Final[Mapping[str, Mapping[Collection[str], str]]] = {
    "pawl.agent.v1.AgentRegistryService": {
        READERS: "GetAgent ListAgents ListAgentVersions",
        _MEMBERS: "UpdateDraft DeleteDraft",
        (Role.ADMIN,): "UpdateAgent DeleteAgent",
    },
    "pawl.agent.v1.AgentService": {
        READERS: "WatchRun GetRun ListRuns ListCalls ListSteps WatchSteps GetRound ListMessages ListPending"
        " WatchPending PreviewUndo GetUndoReport",
        _MEMBERS: "StartRun Session LeaseCall SubmitToolResults Decide DecideCalls SendMessage CancelRun TopUpRun"
        " UndoRun UndoCall",
        _OPERATORS: "ResolveCall",
        ROLES: "WhoAmI",
    },
    "pawl.agent.v1.ConversationService": {
        READERS: "GetConversation ListConversations WatchConversation ExportConversation",
        _MEMBERS: "UpdateConversation ForkConversation ImportConversation EraseConversation",
    },
    "pawl.agent.v1.DeclarationService": {
        READERS: "ListDeclarations",
        _MEMBERS: "PutDeclaration DeleteDeclaration LeaseSet",
    },
    "pawl.agent.v1.GoalService": {READERS: "GetGoal ListGoals", _MEMBERS: "StartGoal RaiseGoal"},
    "pawl.agent.v1.JobService": {READERS: "GetJob ListJobs", _MEMBERS: "StartJob StopJob StopJobs PauseJob ResumeJob"},
    "pawl.agent.v1.OperatorService": {_OPERATORS: "ListAttention RedriveRun EndRun EndJobs"},
    "pawl.agent.v1.ScheduleService": {
        READERS: "GetSchedule ListSchedules",
        _MEMBERS: "CreateSchedule UpdateSchedule PauseSchedule ResumeSchedule TriggerSchedule"
        " BackfillSchedule DeleteSchedule",
    },
    "pawl.agent.v1.TriggerService": {
        READERS: "GetTrigger ListTriggers",
        _MEMBERS: "CreateTrigger UpdateTrigger PauseTrigger ResumeTrigger DeleteTrigger RotateTriggerSecret",
        (Role.GATEWAY,): "DeliverWebhook",
        (MAILBOX,): "DeliverMail",
    },
    "pawl.agent.v1.UsageService": {READERS | {Role.DEPLOYMENT}: "GetUsage"},
    "pawl.agent.v1.WorkflowService": {
        READERS: "GetWorkflow ListWorkflows ListWorkflowVersions GetWorkflowSchema GetExecution",
        _MEMBERS: "StartWorkflow RerunFrom PauseExecution ResumeExecution",
        _MEMBERS | {Role.GATEWAY}: "SendEvent",
        (Role.ADMIN,): "SaveWorkflow DeleteWorkflow",
    },
    "pawl.batch.v1.BatchService": {(AGENT_LOOP, TOOL_REGISTRY, NOTIFIER, MAILBOX, GATEWAY): "Batch"},
    "pawl.identity.v1.KeyService": {(Role.OPERATOR, Role.DEPLOYMENT): "CreateKey ListKeys RevokeKey ListKeyEvents"},
    "pawl.identity.v1.KeySyncService": {(AGENT_LOOP, TOOL_REGISTRY, NOTIFIER): "SyncKeys"},
    "pawl.job.v1.AgentLedgerService": {
        (AGENT_LOOP,): "PutAgent ListAgents GetModelTerms PutDraft GetDraft ListDrafts",
        (AGENT_LOOP, TOOL_REGISTRY): "GetAgent",
    },
    "pawl.job.v1.ErasureService": {(TOOL_REGISTRY, NOTIFIER): "ListErasures ConfirmErasure"},
    "pawl.job.v1.LedgerService": {
        (AGENT_LOOP,): "SubmitMessage StartJob ClaimRuns LoadRun RenewLeases ReleaseWorker ReportCrash CommitRun"
        " SendCommand ListCommands GetCalls LeaseOffer RenewOffers ReleaseOffers ListPendingCalls ListEvents"
        " ImportConversation ListChanges ListVersions",
        (TOOL_REGISTRY,): "NoteCompletion GetConversation",
        (AGENT_LOOP, TOOL_REGISTRY): "GetRun ListJobs StopJob GetCall",
    },
    "pawl.job.v1.ModelService": {(AGENT_LOOP,): "TakeModelCall ReportModelServer"},
    "pawl.job.v1.TitleService": {(AGENT_LOOP,): "ClaimTitles SetTitle"},
    "pawl.job.v1.ScheduleLedgerService": {
        (AGENT_LOOP,): "GetDueSchedule ClaimSchedules FireSchedule",
    },
    "pawl.job.v1.TriggerLedgerService": {
        (AGENT_LOOP,): "CheckWebhook ClaimEvents CheckMailbox FireTrigger",
        (MAILBOX,): "LeaseMailboxes ReportMailbox",
    },
    "pawl.job.v1.WorkflowLedgerService": {(AGENT_LOOP,): "PutWorkflow GetWorkflow DeleteWorkflow"},
    "pawl.notify.v1.ChannelService": {
        READERS: "GetChannel ListChannels ListDeliveries",
        _MEMBERS: "CreateChannel UpdateChannel DeleteChannel SendChannelCode ConfirmChannel RotateChannelSecret"
        " TestChannel ResendDelivery ResendDeliveries",
        (Role.GATEWAY,): "UnsubscribeChannel",
    },
    "pawl.notify.v1.NotifyService": {
        READERS: "Subscribe ListNotifications",
        _MEMBERS: "AcknowledgeNotifications",
    },
    "pawl.notify.v1.PreferenceService": {
        READERS: "GetPreferences",
        _MEMBERS: "UpdatePreferences MuteConversation UnmuteConversation",
    },
    "pawl.settings.v1.SettingsService": {
        (*_OPERATORS, Role.DEPLOYMENT): "GetSettings ExplainSettings ListSettingsChanges",
        (Role.ADMIN, Role.DEPLOYMENT): "UpdateSettings",
    },
    "pawl.tool.v1.AuditService": {_OPERATORS: "ListAudit VerifyAudit GetToolAnalytics"},
    "pawl.tool.v1.CompletionService": {_MEMBERS | {Role.GATEWAY}: "CompleteCall"},
    "pawl.tool.v1.DocumentService": {
        READERS: "ListDocuments GetDocument",
        _MEMBERS | {MAILBOX}: "PutDocument",
        _MEMBERS: "DeleteDocument",
    },
    "pawl.tool.v1.ExecutionService": {
        (
            AGENT_LOOP,
        ): "ResolveTools CheckOwnTools PutWorkflowTool CheckCalls CheckAnswer CheckOutput ReadDocument RecordDecisions"
        " RecordResults ExecuteTool CancelExecution",
    },
    "pawl.tool.v1.FileService": {READERS: "GetFile ListFiles", _MEMBERS: "PutFile"},
    "pawl.tool.v1.MemoryService": {
        READERS: "ListMemories",
        _MEMBERS: "EraseMemories",
    },
    "pawl.tool.v1.RuleService": {READERS: "ListRules", _MEMBERS: "CreateRule RevokeRule"},
    "pawl.tool.v1.SourceService": {_OPERATORS: "AddSource RemoveSource ListSources CheckSource ApproveSource"},
    "pawl.tool.v1.ToolService": {
        READERS | {Role.WORKER}: "GetTool ListTools",
        (Role.MEMBER, Role.ADMIN): "RegisterTool",
        (Role.MEMBER, Role.ADMIN, Role.WORKER): "UnregisterTool",
    },
    "pawl.tool.v1.WorkerService": {(Role.ADMIN, Role.WORKER): "AttachWorker"},
    "grpc.reflection.v1.ServerReflection": {ANYBODY: "ServerReflectionInfo"},
    "grpc.reflection.v1alpha.ServerReflection": {ANYBODY: "ServerReflectionInfo"},
}


def _rows() -> Iterator[tuple[str, frozenset[str]]]:
    for service, groups in _TABLE.items():
        for callers, methods in groups.items():
            for method in methods.split():
                yield f"/{service}/{method}", frozenset(callers)


# The roles and services that may call each method, by full method name. Unlisted methods have no callers.
CALLERS: Final[Mapping[str, frozenset[str]]] = dict(_rows())


def rights(roles: Collection[str]) -> frozenset[str]:
    """Return the caller classes of CALLERS to which a credential with these roles belongs.

    A credential without roles is a member. Unknown roles, such as misspelt ones, grant no rights.
    """
    return ROLES.intersection(roles) if roles else frozenset({Role.MEMBER})
