"""Each command sends the right request and shows the response."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pawl.agent.v1 import agent_pb2, agents_pb2, declaration_pb2, operator_pb2, steps_pb2, undo_pb2, usage_pb2
from pawl.agent.v1 import schedule_pb2 as schedule_requests
from pawl.agent.v1 import trigger_pb2 as trigger_requests
from pawl.client import AsyncClient
from pawl.client.target import Target
from pawl.event.v1 import call_pb2, run_pb2, schedule_pb2, trigger_pb2
from pawl.event.v1.agent_pb2 import AgentDefinition
from pawl.identity.v1 import key_pb2
from pawl.notify.v1 import preference_pb2
from pawl.settings.v1 import settings_pb2
from pawl.tool.v1 import audit_pb2, document_pb2, memory_pb2, rule_pb2, source_pb2
from tests.unit.cli.test_commands import invoke

OWNED = declaration_pb2.Declaration(kind="source", name="shop", set="pack")


class Suite:
    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.asked: list[Any] = []
        self._answers = answers

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def answer(request: Any, **_: Any) -> Any:
            if method == "ListDeclarations":
                return declaration_pb2.ListDeclarationsResponse(declarations=[OWNED])
            self.asked.append(request)
            if "request_id" in request.DESCRIPTOR.fields_by_name:
                assert request.request_id
                request.ClearField("request_id")
            return self._answers.get(method)

        return answer


IN_DOUBT = call_pb2.Call(run_id="run_1", call_id="call_1", tool_name="pay", state=call_pb2.CALL_STATE_RUNNING)
NEEDS_OPERATOR = operator_pb2.ListAttentionResponse(
    runs=[
        operator_pb2.RunInNeed(
            run_id="run_1",
            user_id="ann",
            attention=run_pb2.Attention(reason=run_pb2.ATTENTION_REASON_QUARANTINED),
            stop_cause=run_pb2.STOP_CAUSE_USER,
            calls=[IN_DOUBT, call_pb2.Call(call_id="call_2", tool_name="other")],
        )
    ]
)
AUDIT = audit_pb2.AuditEntry(seq=7, tool_name="pay", user_id="ann", delegate_user_id="bot", by_user_id="bob")
SETTINGS: Mapping[str, Any] = {
    "GetSettings": settings_pb2.GetSettingsResponse(),
    "UpdateSettings": settings_pb2.UpdateSettingsResponse(),
}
MADE: Mapping[str, Any] = {
    "AddSource": source_pb2.AddSourceResponse(),
    "ApproveSource": source_pb2.ApproveSourceResponse(),
    "RemoveSource": source_pb2.RemoveSourceResponse(),
    "RevokeKey": key_pb2.RevokeKeyResponse(),
    "UpdateDraft": agents_pb2.UpdateDraftResponse(created=True),
    "GetAgent": agents_pb2.GetAgentResponse(),
    "GetPreferences": preference_pb2.GetPreferencesResponse(),
}
READ = undo_pb2.CallUndo(tool_name="calculate", state=undo_pb2.UNDO_STATE_NOTHING_TO_UNDO, reason="it was read-only")
REASONING = steps_pb2.Step(type=steps_pb2.STEP_TYPE_REASONING, content="First I look.\n" * 20 + "Then I answer.")
OF_AGENT = rule_pb2.Rule(tool_name="pay", scope=rule_pb2.RULE_SCOPE_AGENT, scope_id="clerk")
TEA = schedule_pb2.Schedule(definition=schedule_pb2.ScheduleDefinition(name="tea", text="Drink", cron="0 9 * * *"))
MAILBOX = trigger_pb2.MailboxSource(host="mx.example", folder="Orders", poll_seconds=300, senders=["@example.com"])
MAIL = trigger_pb2.Trigger(definition=trigger_pb2.TriggerDefinition(name="mails", mailbox=MAILBOX))
MAILS = {
    "GetTrigger": trigger_requests.GetTriggerResponse(trigger=MAIL),
    "UpdateTrigger": trigger_requests.UpdateTriggerResponse(trigger=MAIL),
}
DOCUMENT = source_pb2.OpenApiConfig(document=b"name: clerk\n", headers={"key": "a=b"})

# Command, answers of the suite, its last request where it matters, and parts of the output.
DONE: list[tuple[str, Mapping[str, Any], Any, tuple[str, ...]]] = [
    ("--version", {}, None, (f"pawl {version('pawl-runtime')}",)),
    ("attention", {"ListAttention": NEEDS_OPERATOR}, None, ("user ann", "being stopped", "pay", "pawl redrive run_1")),
    ("attention", {"ListAttention": operator_pb2.ListAttentionResponse()}, None, ("No run needs attention.",)),
    (
        "resolve run_1 call_1 --tell-model",
        {"ListAttention": NEEDS_OPERATOR},
        agent_pb2.ResolveCallRequest(run_id="run_1", call_id="call_1", resolution=agent_pb2.RESOLUTION_TELL_MODEL),
        ("[pay: did it happen?]", "Resolved."),
    ),
    (
        "redrive run_1 --reason mended",
        {"RedriveRun": operator_pb2.RedriveRunResponse(state=run_pb2.RUN_STATE_QUEUED)},
        operator_pb2.RedriveRunRequest(run_id="run_1", reason="mended"),
        ("run_1 is queued again.",),
    ),
    (
        "end run_1",
        {"EndRun": operator_pb2.EndRunResponse(state=run_pb2.RUN_STATE_CANCELLED)},
        operator_pb2.EndRunRequest(run_id="run_1"),
        ("run_1 is cancelled.",),
    ),
    (
        "audit list",
        {"ListAudit": audit_pb2.ListAuditResponse(entries=[AUDIT])},
        None,
        ("7\t", "pay", "bot for ann", " by bob"),
    ),
    ("tools stats", {"GetToolAnalytics": audit_pb2.GetToolAnalyticsResponse()}, None, ("No tool has been called.",)),
    ("keys list", {"ListKeys": key_pb2.ListKeysResponse()}, None, ("There are no keys.",)),
    (
        "memory erase --yes --agent clerk",
        {"EraseMemories": memory_pb2.EraseMemoriesResponse()},
        memory_pb2.EraseMemoriesRequest(agent_name="clerk"),
        ("Erased 0 memories.",),
    ),
    (
        "triggers update mails --poll '' --folder '' --sender ''",
        MAILS,
        trigger_requests.UpdateTriggerRequest(
            definition=trigger_pb2.TriggerDefinition(name="mails", mailbox=trigger_pb2.MailboxSource(host="mx.example"))
        ),
        ("mails: e-mails to",),
    ),
    (
        "schedules update tea --every 1h --json",
        {
            "GetSchedule": schedule_requests.GetScheduleResponse(schedule=TEA),
            "UpdateSchedule": schedule_requests.UpdateScheduleResponse(schedule=TEA),
        },
        schedule_requests.UpdateScheduleRequest(
            definition=schedule_pb2.ScheduleDefinition(name="tea", text="Drink", interval_seconds=3600)
        ),
        ('{"schedule": {"definition": {"name": "tea"',),
    ),
    (
        "keys create ann --role member --for 1h",
        {"CreateKey": key_pb2.CreateKeyResponse(key=key_pb2.Key(key_id="key_1"), secret="pawl_s")},
        None,
        ("pawl keys revoke key_1", "\npawl_s\n"),
    ),
    (
        "runs --state needs-attention --wait agent-quota --label a=1 --oldest",
        {"ListRuns": agent_pb2.ListRunsResponse()},
        agent_pb2.ListRunsRequest(
            page_size=200,
            states=[run_pb2.RUN_STATE_NEEDS_ATTENTION],
            waits=[run_pb2.WAIT_KIND_AGENT_QUOTA],
            labels={"a": "1"},
            order=agent_pb2.RUN_ORDER_OLDEST_FIRST,
        ),
        ("There are no runs.",),
    ),
    ("notify unmute conv_1", MADE, preference_pb2.UnmuteConversationRequest(conversation_id="conv_1"), ("Unmuted",)),
    ("rules list", {"ListRules": rule_pb2.ListRulesResponse(rules=[OF_AGENT])}, None, ("for runs of the agent clerk",)),
    ("agents delete draft/clerk --yes", MADE, agents_pb2.DeleteDraftRequest(name="clerk"), ("Deleted draft/clerk.",)),
    (
        "apply --draft --file FILE",
        {**MADE, "ListAgents": agents_pb2.ListAgentsResponse()},
        agents_pb2.UpdateDraftRequest(definition=AgentDefinition(name="clerk")),
        ("draft/clerk: version",),
    ),
    (
        "sources add-http shop --openapi FILE --header key=a=b",
        MADE,
        source_pb2.AddSourceRequest(config=source_pb2.SourceConfig(name="shop", open_api=DOCUMENT)),
        ("warning: the source 'shop' belongs to the set 'pack'; the next `pawl apply` of this set restores it",),
    ),
    ("sources approve shop abc", MADE, source_pb2.ApproveSourceRequest(name="shop", definitions_hash="abc"), ()),
    ("sources remove shop", MADE, source_pb2.RemoveSourceRequest(name="shop"), ("Removed",)),
    (
        "undo run_1 --preview",
        {"PreviewUndo": undo_pb2.PreviewUndoResponse(calls=[READ])},
        undo_pb2.PreviewUndoRequest(run_id="run_1"),
        ("calculate nothing to undo: it was read-only", "There is nothing to undo."),
    ),
    (
        "steps run_1 --full",
        {"ListSteps": steps_pb2.ListStepsResponse(steps=[REASONING])},
        None,
        ("reasoning", "Then I answer."),
    ),
    (
        "steps run_1 --round 2",
        {
            "GetRound": steps_pb2.GetRoundResponse(
                request_json=b'{"model":"m","messages":[]}', matches=True, sent_sha256="ab", model="m"
            )
        },
        steps_pb2.GetRoundRequest(run_id="run_1", round=2),
        ("This request was sent to m (SHA-256 ab).", '  "model": "m",'),
    ),
    (
        "--store acme usage",
        {"GetUsage": usage_pb2.GetUsageResponse()},
        usage_pb2.GetUsageRequest(page_size=200, store_id="acme"),
        (),
    ),
    (
        "settings set runs listed --store acme --store globex",
        SETTINGS,
        settings_pb2.UpdateSettingsRequest(
            settings=settings_pb2.Settings(
                layer=settings_pb2.SETTINGS_LAYER_DEPLOYMENT,
                switches={
                    "runs": settings_pb2.Switch(state=settings_pb2.SWITCH_STATE_LISTED, store_ids=["acme", "globex"])
                },
            )
        ),
        ("Set runs.",),
    ),
    (
        "--store acme settings unset active_runs --ceiling",
        SETTINGS,
        settings_pb2.UpdateSettingsRequest(
            settings=settings_pb2.Settings(layer=settings_pb2.SETTINGS_LAYER_CEILING, store_id="acme"),
            unset=["active_runs"],
        ),
        ("Removed active_runs.",),
    ),
    ("keys revoke key_1", MADE, key_pb2.RevokeKeyRequest(key_id="key_1"), ("Revoked key_1",)),
    (
        "keys create shop --store acme --role delegate --role member",
        {"CreateKey": key_pb2.CreateKeyResponse(secret="pawl_s")},
        key_pb2.CreateKeyRequest(key=key_pb2.Key(store_id="acme", user_id="shop", roles=["delegate", "member"])),
        ("pawl_s",),
    ),
    (
        "rules allow pay --like to=ann@* --equals cc=[] --reason colleagues",
        {"CreateRule": rule_pb2.CreateRuleResponse(rule=OF_AGENT)},
        None,
        ("pay",),
    ),
    ("rules revoke rule_1", MADE, rule_pb2.RevokeRuleRequest(rule_id="rule_1"), ("Revoked rule_1",)),
    (
        "documents remove menu.txt --shared",
        MADE,
        document_pb2.DeleteDocumentRequest(name="menu.txt", owner=document_pb2.DOCUMENT_OWNER_STORE),
        ("Removed menu.txt.",),
    ),
]


def test_a_command_sends_its_request_and_shows_the_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clerk.yaml"
    file.write_text("name: clerk\n")
    monkeypatch.setattr(AsyncClient, "get_conversation", AsyncMock())
    for command, answers, sent, shown in DONE:
        suite = Suite(answers)
        for service in [name for name, made in vars(Target).items() if isinstance(made, cached_property)]:
            monkeypatch.setattr(AsyncClient, service, suite)
        code, output = invoke(*shlex.split(command.replace("FILE", str(file))))
        assert (code, [part for part in shown if part not in output]) == (0, []), (command, output)
        assert sent is None or sent == suite.asked[-1], command
    file.write_text("title: clerk\n")
    assert "an agent must be a mapping with a `name`" in invoke("apply", "--file", str(file))[1]
