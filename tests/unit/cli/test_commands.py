"""Commands as users type them: flags, addresses, keys, tokens, and the requests that the commands send."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from typer.testing import CliRunner

from pawl.agent.v1 import agent_pb2, agents_pb2, declaration_pb2, operator_pb2, steps_pb2, undo_pb2
from pawl.agent.v1 import schedule_pb2 as schedule_requests
from pawl.agent.v1 import trigger_pb2 as trigger_requests
from pawl.chassis.identity.local_key import LOCAL_KEY, KeyInClear
from pawl.chassis.rpc.replicas import Endpoints, Replica
from pawl.cli.__main__ import app, flags_first
from pawl.client import AsyncClient, StartError
from pawl.client.target import Target
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2, schedule_pb2, trigger_pb2
from pawl.event.v1.agent_pb2 import AgentDefinition
from pawl.identity.v1 import key_pb2
from pawl.launcher.folder import SecretFiles, write_endpoints
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import preference_pb2
from pawl.tool.v1 import audit_pb2, document_pb2, memory_pb2, rule_pb2, source_pb2
from tests.tables import for_each, not_explained, not_refused

UNREACHABLE = "127.0.0.1:1"


def invoke(*arguments: str, input_text: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, input=input_text, env={"PAWL_ADDRESS": UNREACHABLE, "COLUMNS": "200"})
    return result.exit_code, result.output


def test_without_a_suite_a_command_gives_one_clear_error_and_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pawl.cli.command.FOLLOW_SECONDS", 0.0)
    for command in (
        "run hello",
        "watch run_1",
        "runs --since 365000000d",
        "inbox",
        "approve run_1 call_1",
        "attention",
    ):
        code, output = invoke(*command.split())
        assert (code, f"No Pawl suite answers at {UNREACHABLE}" in output.splitlines()[-1]) == (2, True), command
        assert "Traceback" not in output
    monkeypatch.setenv("PAWL_TOOL_REGISTRY_ADDRESS", UNREACHABLE)
    code, output = invoke("tools")
    assert (code, output.startswith(f"tool-registry does not answer at {UNREACHABLE}.")) == (2, True)


def test_an_invalid_command_line_exits_with_2_and_explains_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_NOTIFIER_ADDRESS", UNREACHABLE)
    for command, text in {
        ("run",): "Missing argument",
        ("approve", "run_1"): "Missing argument",
        ("watch", "run_1", "--after", "-1"): "--after",
        ("invented",): "No such command",
        ("top-up", "run_1", str(2**64)): "tokens: 18446744073709551616 is out of range.",
        ("up", "--port", "nothing=1"): "nothing",
        ("approve", "run_1", "call_1", "--reject", "no", "--answer", "x"): "are mutually exclusive",
        ("events", "--subject", "pawl.>.run"): "is not a NATS subject",
        ("complete", "token"): "--result JSON or --error TEXT",
        ("complete", "token", "--result", "{"): "--result is not JSON",
        ("resolve", "run_1", "call_1"): "--happened JSON, --run-again and --tell-model",
        ("resolve", "run_1", "call_1", "--run-again", "--tell-model"): "Specify exactly one of",
        ("resolve", "run_1", "call_1", "--happened", "sent"): "is not JSON",
        ("sources", "add-http", "shop", "--endpoint", "https://x", "--operation", "pay"): (
            "--endpoint cannot be combined with --operation."
        ),
        ("sources", "add-mcp", "files"): "Specify COMMAND or --url.",
        ("sources", "add-http", "shop"): "Specify --openapi or --endpoint.",
        ("sources", "add-mcp", "files", "--url", "https://x", "--header", "key"): "--header: 'key' must be key=value",
        ("triggers", "create", "x", "--webhook", "bearer", "--mailbox", "a@b"): "--mailbox cannot be combined with",
        (
            "schedules",
            "create",
            "x",
            "--text",
            "hi",
            "--every",
            "1h",
            "--cron",
            "0 9 * * *",
        ): "--every cannot be combined with",
        ("triggers", "delete", "", "--yes"): "No Pawl suite answers",
        ("rules", "allow", "*", "--run", "run_1", "--all-users"): "Specify only one of --run,",
        ("apply", "--file", "/dev/null"): "No resources found in",
        ("settings", "set", "runs", "\u0663%"): "'\u0663%' is not valid: use on, off,",
        ("settings", "set", "active_runs", "9" * 5000): "is not valid: use on, off,",
        ("notify", "update", "hook_1", "--kind", "foo"): "'--kind': 'foo' is not one of 'run-completed'",
        ("notify", "update", "hook_1", "--kind", "run-failed"): "notifier does not answer",
        ("notify", "preferences", "--quiet", "Fri-Mon,wed 22:00-07:00"): "notifier does not answer",
        ("notify", "preferences", "--quiet", "22:00"): "'22:00'",
        ("notify", "preferences", "--quiet", "mon- 22:00-07:00"): "'mon-'",
        ("notify", "preferences", "--quiet", "22:00-07:00", "--no-quiet"): "cannot be combined with",
        ("run", "caf\udce9"): "UTF-8",
        ("schedules", "show", "caf\udce9"): "UTF-8",
        ("--address", "https://pawl.example", "runs"): "without a scheme",
        ("conversations", "import", "/absent.json"): "cannot be read: No such file",
    }.items():
        code, output = invoke(*command)
        assert (code, text in output, "Traceback" in output) == (2, True, False), (command, output)


def test_an_address_overrides_the_data_folder(tmp_path: Path) -> None:
    def client(address: str) -> AsyncClient:
        return AsyncClient(address=address, data=tmp_path, environment={})

    target = client("10.0.0.1:9, 10.0.0.2:9")
    addresses = [("10.0.0.1:9", "10.0.0.2:9"), ("10.0.0.1:7602", "10.0.0.2:7602"), ("10.0.0.1:7604", "10.0.0.2:7604")]
    assert [target.agent, target.tools, target.notifications] == addresses
    assert not_refused(StartError, client, ["localhost", ":7601", "a:b", ",", "127.0.0.1:99999"]) == []
    with pytest.raises(StartError, match=f"No Pawl suite is running in {tmp_path}"):
        AsyncClient(data=tmp_path, environment={})


@pytest.mark.parametrize("address", ["10.0.0.1:7601", "pawl.example:7601", "127.0.0.1:7601,10.0.0.1:7601"])
def test_a_key_leaves_this_machine_only_over_tls(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-1: the error explains what to do."""
    for name in ("open_channel", "connect"):
        monkeypatch.setattr(f"pawl.client.target.{name}", lambda *_, **__: MagicMock())

    def found(key: str = "the-key-of-ann", **more: Any) -> AsyncClient:
        return AsyncClient(address=address, data=tmp_path, environment={"PAWL_API_KEY": key} if key else {}, **more)

    requests: list[Callable[[AsyncClient], object]] = [
        lambda target: target.agents,
        lambda target: target.key_register,
        lambda target: target.connect("10.0.0.1:7601"),
    ]
    for ask in requests:
        with pytest.raises(KeyInClear, match=r"unencrypted.*--ca FILE or PAWL_TLS_CA_FILE.*--key-in-clear") as caught:
            ask(found())
        assert "the-key-of-ann" not in str(caught.value)
        assert all(map(ask, (found(key_in_clear=True), found(key="")))), "an empty key needs no protection"


def test_an_empty_key_is_not_replaced_by_the_local_key(tmp_path: Path) -> None:
    """If the file is missing, `$(cat ann.key)` is empty, and must not act as the owner of the machine."""

    def client(key: str) -> AsyncClient:
        environment = {"PAWL_API_KEY": key}
        return AsyncClient(address="127.0.0.1:1", data=tmp_path, store="acme", user="ann", environment=environment)

    keys = ("", " \n", "pawl_secret\r", "Made key_1\npawl_secret", "Bearer pawl_secret", "schlüssel")
    assert not_explained(StartError, client, dict.fromkeys(keys, "^(?!.*secret)")) == []
    assert client("k").metadata == (("authorization", "Bearer k"), ("pawl-store", "acme"), ("pawl-user", "ann"))


def test_the_local_key_is_sent_only_to_its_own_suite(tmp_path: Path) -> None:
    def replica(address: str) -> Replica:
        return Replica(grpc=address, metrics="", pid=1, ready=True)

    def shown(address: str | None, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        return dict(AsyncClient(address=address, data=tmp_path, environment=environment).metadata)

    SecretFiles(tmp_path / "secrets").put(LOCAL_KEY, "the-key-of-the-folder")
    services = {
        "agent-loop": [replica("127.0.0.1:1"), replica("127.0.0.1:2")],
        "tool-registry": [replica("127.0.0.1:3")],
        "notifier": [replica("127.0.0.1:4")],
        "job-store": [replica("127.0.0.1:6")],
    }
    write_endpoints(Endpoints(launcher_pid=os.getpid(), data=str(tmp_path), secrets="", services=services))
    assert shown(None) == shown("127.0.0.1:2") == {"authorization": "Bearer the-key-of-the-folder"}
    assert shown(None, {"PAWL_API_KEY": "mine"}) == {"authorization": "Bearer mine"}
    for elsewhere in ("127.0.0.1:5", "127.0.0.1:1,127.0.0.1:5", "10.0.0.1:1"):
        assert shown(elsewhere) == {}
    services = {"agent-loop": [replica("192.0.2.1:7601")]}
    write_endpoints(Endpoints(launcher_pid=os.getpid(), data=str(tmp_path), secrets="", services=services))
    assert shown("192.0.2.1:7601") == {}


@pytest.mark.parametrize(
    ("command", "field", "option"),
    [
        (("jobs", "start", "clock"), "iterations_max", "--stop-after"),
        (("schedules", "create", "news"), "definition.catch_up_seconds", "--catch-up"),
        (("triggers", "create", "mails"), "definition.mailbox.poll_seconds", "--poll"),
        (("run", "hello"), "options.limits.total_tokens_max", "--tokens-max"),
        (("runs",), "parent_run_id", "--parent"),
        (("watch", "run_1"), "run_id", "run_id"),
    ],
)
def test_every_command_reports_invalid_fields_by_option(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], field: str, option: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidField(f"{field} is wrong", field=field)

    monkeypatch.setattr(AsyncClient, "__init__", refuse)
    assert invoke(*command) == (2, f"{option} is wrong.\n")


def test_a_foreign_data_folder_cannot_redirect_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".pawl").mkdir()
    environment = {"PAWL_API_KEY": "key"}
    for elsewhere in ("203.0.113.9:7601", "example.com:7601", "nonsense"):
        services = {"agent-loop": [Replica(grpc=elsewhere, metrics="", pid=1, ready=True)]}
        write_endpoints(Endpoints(launcher_pid=os.getpid(), data=".pawl", secrets="", services=services))
        assert AsyncClient(data=None, environment=environment).agent == ("127.0.0.1:7601",), elsewhere
        with pytest.raises(StartError, match="No Pawl suite"):
            AsyncClient(data=Path(".pawl"), environment=environment)


@for_each(
    ("content", "text"),
    [
        (b"nothing", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"model": "m"}', "must contain a list of"),
        (b" " * (4 * 1024 * 1024 + 1), "bytes"),
        (b'[{"role": "user", "content": 7}, 8]', "message 2"),
        (b'[{"role": "user", "content": "\\ud800"}]', "is not JSON"),
        (b'[{"role": "user", "content": "hello"}]', "No Pawl suite answers"),
    ],
)
def test_an_unreadable_history_is_refused_with_a_clear_error(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "history.json").write_bytes(content)
    code, output = invoke("conversations", "import", str(tmp_path / "history.json"))
    assert (code, text in output, "Traceback" in output) == (2, True, False), output


@for_each(
    ("given", "read"),
    [
        (["tools"], ["tools"]),
        (["tools", "--data", "folder"], ["--data", "folder", "tools"]),
        (["--data", "folder", "tools"], ["--data", "folder", "tools"]),
        (["run", "--store=one", "hello", "--user", "ann"], ["--store=one", "--user", "ann", "run", "hello"]),
        (["run", "--key-in-clear", "hello"], ["--key-in-clear", "run", "hello"]),
        (["run", "--", "--data"], ["run", "--", "--data"]),
        (["run", "--json", "hello"], ["run", "--json", "hello"]),
    ],
)
def test_flags_may_come_before_or_after_the_command(given: Any, read: Any) -> None:
    assert flags_first(given) == read


TOKEN = "cmp_abc"


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tokens: list[str] = []

    async def complete_call(_: AsyncClient, token: str, *_result: Any, error: str) -> bool:
        tokens.append(token)
        return False

    monkeypatch.setattr(AsyncClient, "complete_call", complete_call)
    return tokens


def complete(token: str, standard_input: str = "") -> tuple[int, str]:
    return invoke("--address", "127.0.0.1:1", "complete", token, "--result", "1", input_text=standard_input)


def test_a_token_is_read_from_stdin_a_file_or_the_argument(completed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "order.token"
    file.write_text(f"{TOKEN}\n")
    for given, standard_input in (("-", f" {TOKEN}\r\nmore\n"), (f"@{file}", ""), (TOKEN, "")):
        assert complete(given, standard_input) == (0, "Completed.\n")
    assert completed == [TOKEN] * 3


def test_an_unreadable_token_is_reported(completed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    absent = "absent cannot be read: No such file or directory"
    says = {"-": "Standard input is empty.", f"@{file}": f"{file} is empty.", f"@{tmp_path}/absent": absent}
    for token, problem in says.items():
        code, output = complete(token)
        assert (code, problem in output, completed) == (2, True, [])


def test_resending_all_dead_deliveries_skips_confirmation_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service resends all deliveries or none, so one mistyped address would leave all others dead."""
    sent: list[str] = []

    async def pages(_client: AsyncClient, _call: object, _request: object) -> AsyncIterator[Any]:
        types = ("run.completed", "channel.code", "channel.test")
        yield pb.ListDeliveriesResponse(deliveries=[pb.ChannelDelivery(delivery_id=f"dlv_{n}", type=n) for n in types])

    async def resend(request: pb.ResendDeliveriesRequest) -> None:
        sent.extend(request.delivery_ids)

    monkeypatch.setattr(AsyncClient, "pages", pages)
    monkeypatch.setattr(AsyncClient, "notify_channels", MagicMock(ResendDeliveries=resend))
    code, output = invoke("notify", "resend", "--dead")
    assert (code, output, sent) == (0, "Resending 2 deliveries.\n", ["dlv_run.completed", "dlv_channel.test"])


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
        ("warning: the source 'shop' belongs to the set 'pack', whose next pawl apply restores it",),
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
    ("keys revoke key_1", MADE, key_pb2.RevokeKeyRequest(key_id="key_1"), ("Revoked key_1",)),
    (
        "keys create shop --in-store acme --role delegate --role member",
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
