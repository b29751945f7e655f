"""Commands as users type them: flags, addresses, keys and tokens."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from typer.testing import CliRunner

from pawl.chassis.identity.local_key import LOCAL_KEY, KeyInClear
from pawl.chassis.rpc.replicas import Endpoints, Replica
from pawl.chassis.visible import HIDDEN
from pawl.cli.__main__ import app, flags_first
from pawl.client import AsyncClient, StartError
from pawl.errors import InvalidField
from pawl.launcher.folder import SecretFiles, write_endpoints
from pawl.notify.v1 import channel_pb2 as pb
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
        ("rules", "allow", "*", "--run", "run_1", "--all-users"): "Specify at most one of --run,",
        ("apply", "--file", "/dev/null"): "No resources found in",
        ("settings", "set", "runs", "\u0663%"): "runs must be on, off, listed or a percentage such as 10%, got",
        ("settings", "set", "active_runs", "9" * 5000): "active_runs must be a whole number of at most 18 digits, got",
        (
            "settings",
            "set",
            "active_runs",
            "five",
        ): "active_runs must be a whole number of at most 18 digits, got 'five'",
        ("settings", "set", "rnus", "off"): "There is no switch 'rnus'. The switches are runs,",
        ("--store", "a", "--store", "b", "usage"): "Specify --store only once.",
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
    assert invoke("notify", "resend", "--dead") == (0, "Resending 2 deliveries.\n")
    assert sent == ["dlv_run.completed", "dlv_channel.test"]


def test_an_export_escapes_hidden_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "\x9b31m\u202e på \U000e0041"}]
    monkeypatch.setattr(AsyncClient, "export_conversation", AsyncMock(return_value=messages))
    code, output = invoke("conversations", "export", "conv_1")
    assert (code, HIDDEN.search(output), json.loads(output)) == (0, None, messages)
