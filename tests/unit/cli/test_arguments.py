"""Flags, addresses and what people are told when something is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from typer.testing import CliRunner

from pawl.chassis.endpoints import Endpoints, Replica
from pawl.chassis.local_key import LOCAL_KEY, KeyInClear
from pawl.cli.__main__ import app
from pawl.cli.command import time_of
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient, StartError
from pawl.errors import (
    AlreadyDecided,
    AttentionNotNeeded,
    ConversationExists,
    ConversationNotFound,
    Internal,
    InvalidField,
    InvalidId,
    PermissionDenied,
    RunNotFound,
    ToolNotFound,
    Unauthenticated,
)
from pawl.event.v1 import trigger_pb2
from pawl.launcher.endpoints import write_endpoints
from pawl.launcher.secrets import SecretFiles

NOBODY = "127.0.0.1:1"


def invoke(*arguments: str, input_text: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, input=input_text, env={"PAWL_ADDRESS": NOBODY, "COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "command",
    [
        ("run", "hello"),
        ("run", "--detach", "hello"),
        ("watch", "run_1"),
        ("runs",),
        ("inbox",),
        ("approve", "run_1", "call_1"),
        ("cancel", "run_1"),
        ("top-up", "run_1", "500"),
        ("attention",),
        ("attention", "run_1"),
        ("resolve", "run_1", "call_1", "--tell-model"),
        ("redrive", "run_1"),
        ("end", "run_1"),
        ("fork", "conv_1", "--at", "3", "hello"),
    ],
    ids=" ".join,
)
def test_without_a_suite_a_command_says_so_in_one_sentence_and_ends_with_2(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pawl.client.streams.GIVE_UP_SECONDS", 0.0)
    code, output = invoke(*command)
    assert output.splitlines()[-1] == f"No Pawl suite answers at {NOBODY}. Start one with `pawl up`."
    assert "Traceback" not in output
    assert code == 2


@pytest.mark.parametrize(
    "command",
    [
        ("run",),
        ("watch",),
        ("approve", "run_1"),
        ("watch", "run_1", "--after", "-1"),
        ("invented",),
        ("top-up", "run_1", "0"),
        ("top-up", "run_1", str(2**64)),
        ("redrive",),
        ("end",),
    ],
)
def test_a_command_line_that_is_wrong_ends_with_2(command: tuple[str, ...]) -> None:
    code, output = invoke(*command)
    assert code == 2
    assert "Traceback" not in output


def test_only_one_kind_of_decision_at_a_time() -> None:
    code, output = invoke("approve", "run_1", "call_1", "--reject", "no", "--answer", "x")
    assert code == 2
    assert "only one of" in output


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("events", "--subject", "a b"), "'a b' is no subject of NATS like pawl.v1.>"),
        (("events", "--subject", "pawl.>.run"), "'pawl.>.run' is no subject of NATS"),
        (("complete", "token"), "Say how the call ended: --result JSON or --error TEXT."),
        (("complete", "token", "--result", "{"), "--result is not JSON: "),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_called(command: tuple[str, ...], told: str) -> None:
    code, output = invoke(*command)
    assert code == 2
    assert output.startswith(told)


def test_a_flag_of_up_that_is_wrong_ends_with_2() -> None:
    code, output = invoke("up", "--port", "nothing=1")
    assert code == 2
    assert "Traceback" not in output


def test_the_data_folder_says_where_every_replica_is(tmp_path: Path) -> None:
    def replica(port: int) -> Replica:
        return Replica(grpc=f"127.0.0.1:{port}", metrics="", pid=1, ready=True)

    services = {"agent-loop": [replica(1), replica(2)], "tool-registry": [replica(3)], "notifier": [replica(4)]}
    write_endpoints(Endpoints(launcher_pid=1, data=str(tmp_path), secrets="", services=services))
    target = AsyncClient(data=tmp_path, environment={})
    assert target.agent == ("127.0.0.1:1", "127.0.0.1:2")
    assert (target.tools, target.notifications) == (("127.0.0.1:3",), ("127.0.0.1:4",))


def test_a_data_folder_without_a_suite_is_not_taken_for_another_suite(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=f"No Pawl suite runs on {tmp_path}"):
        AsyncClient(data=tmp_path, environment={})


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ((), "Give one of --happened JSON, --run-again and --tell-model."),
        (("--run-again", "--tell-model"), "Give one of"),
        (("--happened", "sent"), "The result is not JSON"),
    ],
)
def test_a_finding_that_says_nothing_is_refused(options: tuple[str, ...], answer: str) -> None:
    code, output = invoke("--address", "127.0.0.1:1", "resolve", "run_1", "call_1", *options)
    assert code == 2
    assert answer in output


def test_an_address_wins_over_the_data_folder_and_the_rest_is_looked_for_beside_it(tmp_path: Path) -> None:
    target = AsyncClient(address="10.0.0.1:9, 10.0.0.2:9", data=tmp_path, environment={})
    assert target.agent == ("10.0.0.1:9", "10.0.0.2:9")
    assert target.tools == ("10.0.0.1:7602", "10.0.0.2:7602")
    assert target.notifications == ("10.0.0.1:7604", "10.0.0.2:7604")


def test_key_store_and_user_go_with_every_call(tmp_path: Path) -> None:
    environment = {"PAWL_API_KEY": "k"}
    target = AsyncClient(address="127.0.0.1:1", data=tmp_path, store="acme", user="ann", environment=environment)
    assert target.metadata == (("authorization", "Bearer k"), ("pawl-store", "acme"), ("pawl-user", "ann"))


@pytest.mark.parametrize("address", ["10.0.0.1:7601", "pawl.example:7601", "127.0.0.1:7601,10.0.0.1:7601"])
def test_a_key_goes_beyond_this_machine_over_tls_only(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-1: and the answer says what to do."""
    for name in ("open_channel", "connect"):
        monkeypatch.setattr(f"pawl.client.target.{name}", lambda *_, **__: MagicMock())

    def found(key: str = "the-key-of-ann", **more: Any) -> AsyncClient:
        environment = {"PAWL_API_KEY": key} if key else {}
        return AsyncClient(address=address, data=tmp_path, environment=environment, **more)

    asks: list[Callable[[AsyncClient], object]] = [
        lambda target: target.agents,
        lambda target: target.key_register,
        lambda target: target.connect("10.0.0.1:7601"),
    ]
    for ask in asks:
        with pytest.raises(KeyInClear, match=r"unencrypted.*--ca FILE or PAWL_TLS_CA_FILE.*--key-in-clear") as caught:
            ask(found())
        assert "the-key-of-ann" not in str(caught.value)
        assert ask(found(key_in_clear=True))
        assert ask(found(key="")), "there is nothing to hide"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "PAWL_API_KEY is empty"),
        (" \n", "PAWL_API_KEY is empty"),
        ("pawl_secret\r", "line break"),
        ("Made key_1\npawl_secret", "line break"),
        ("Bearer pawl_secret", "a space"),
        ("schlüssel", "another character"),
    ],
)
def test_a_key_that_was_meant_to_be_given_is_not_made_up_for_by_the_local_one(
    tmp_path: Path, given: str, told: str
) -> None:
    """What `$(cat ann.key)` gives of a file that is empty, or not there, must not call as the owner of the machine."""
    with pytest.raises(StartError, match=told) as caught:
        AsyncClient(address="127.0.0.1:1", data=tmp_path, environment={"PAWL_API_KEY": given})
    assert "secret" not in str(caught.value)


def test_a_command_that_would_send_the_key_in_clear_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_API_KEY", "the-key-of-ann")
    code, output = invoke("--address", "203.0.113.9:7601", "runs")
    assert code == 2
    assert output.startswith(
        "The key would go to 203.0.113.9:7601 unencrypted, and whoever hears it could call with it."
    )


def test_without_a_key_of_ones_own_the_one_of_the_data_folder_goes_to_its_suite_and_nowhere_else(
    tmp_path: Path,
) -> None:
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
    bearer = {"authorization": "Bearer the-key-of-the-folder"}
    assert shown(None) == shown("127.0.0.1:2") == bearer
    assert shown(None, {"PAWL_API_KEY": "mine"}) == {"authorization": "Bearer mine"}
    for elsewhere in ("127.0.0.1:5", "127.0.0.1:1,127.0.0.1:5", "10.0.0.1:1"):
        assert shown(elsewhere) == {}
    services = {"agent-loop": [replica("192.0.2.1:7601")]}
    write_endpoints(Endpoints(launcher_pid=os.getpid(), data=str(tmp_path), secrets="", services=services))
    assert shown("192.0.2.1:7601") == {}


@pytest.mark.parametrize("address", ["localhost", ":7601", "a:b", ",", "127.0.0.1:99999"])
def test_an_address_of_another_form_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(StartError):
        AsyncClient(address=address, data=tmp_path, environment={})


@pytest.mark.parametrize("address", ["http://127.0.0.1:7601", "https://pawl.example"])
def test_an_address_has_no_scheme(address: str) -> None:
    assert invoke("--address", address, "runs") == (
        2,
        (
            f"The address '{address}' must be host:port without a scheme, for example 127.0.0.1:7601."
            " For TLS give --ca FILE or PAWL_TLS_CA_FILE.\n"
        ),
    )


def test_the_version_is_told() -> None:
    assert invoke("--version") == (0, f"pawl {version('pawl')}\n")


@pytest.mark.parametrize(("command", "service"), [("tools", "tool-registry"), ("notifications", "notifier")])
def test_a_service_that_does_not_answer_is_named(command: str, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_TOOL_REGISTRY_ADDRESS", NOBODY)
    monkeypatch.setenv("PAWL_NOTIFIER_ADDRESS", NOBODY)
    assert invoke(command) == (
        2,
        (
            f"{service} does not answer at {NOBODY}. If the suite runs, logs/{service}.log in its data folder says why;"
            " else start one with `pawl up`.\n"
        ),
    )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RunNotFound(), "No such run, or none that the caller may see. `pawl runs` lists yours."),
        (
            ConversationNotFound(),
            (
                "No such conversation, or none that the caller may see. `pawl conversations list` lists yours; one that"
                " another user shares can be read, and written to if it says so."
            ),
        ),
        (
            ConversationExists("you have a conversation with this key"),
            (
                "You have a conversation with this key. `pawl conversations show --key` with it shows that one; go on"
                " there, or take another key."
            ),
        ),
        (
            Unauthenticated("the key is not known"),
            (
                "The key is not known. Set PAWL_API_KEY to your key. That of a suite on this machine is found without,"
                " in the folder where `pawl up` runs or with --data FOLDER, for addresses as `pawl up` shows them while"
                " no other user listens there."
            ),
        ),
        (
            Internal("internal error err_1"),
            "Internal error err_1. The log of the service has the details under that id.",
        ),
        (
            AlreadyDecided("decided by bob"),
            "Decided by bob. `pawl inbox` lists the calls that wait.",
        ),
        (
            AttentionNotNeeded("the run is not quarantined"),
            "The run is not quarantined. `pawl attention` lists the runs that need an operator.",
        ),
        (
            ToolNotFound("there is no tool 'clok'; did you mean 'clock'?"),
            "There is no tool 'clok'; did you mean 'clock'? `pawl tools` lists those that there are.",
        ),
        (RunNotFound("where is it?"), "Where is it? `pawl runs` lists yours."),
        (KeyError("x"), "This should not have happened: KeyError: 'x'"),
    ],
)
def test_an_error_is_a_sentence_that_says_what_to_do_next(error: Exception, sentence: str) -> None:
    assert explain(error, [NOBODY]) == sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            Unauthenticated("the key is not known"),
            (
                "The key is not known. It came from PAWL_API_KEY: set that to a key that `pawl keys create` made"
                " here, or to a token that is still good."
            ),
        ),
        (
            PermissionDenied("`pawl-store` names another store: leave it out"),
            "`pawl-store` names another store: leave it out.",
        ),
        (InvalidId("pawl-user must match ^x$"), "pawl-user must match ^x$."),
        (InvalidId("channel_id must match ^x$"), "channel_id must match ^x$. `pawl notify list` shows yours."),
    ],
)
def test_a_refusal_names_what_was_given_and_adds_no_advice_of_another_case(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    monkeypatch.setenv("PAWL_API_KEY", "k")
    assert explain(error, [NOBODY]) == sentence


def test_all_that_is_given_of_a_mailbox_can_be_taken_away_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = trigger_pb2.MailboxSource(host="mx.example", folder="Orders", poll_seconds=300, senders=["@example.com"])
    kept = trigger_pb2.Trigger(definition=trigger_pb2.TriggerDefinition(name="mails", mailbox=source))
    monkeypatch.setattr(AsyncClient, "get_trigger", AsyncMock(return_value=kept))
    update = AsyncMock(return_value=kept)
    monkeypatch.setattr(AsyncClient, "update_trigger", update)
    options = ("--poll", "", "--folder", "", "--sender", "")
    assert invoke("triggers", "update", "mails", *options)[0] == 0
    assert update.await_args_list[0].args[0].mailbox == trigger_pb2.MailboxSource(host="mx.example")


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
def test_every_command_tells_its_options_by_the_fields_that_they_fill(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], field: str, option: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidField(f"{field} is wrong", field=field)

    monkeypatch.setattr(AsyncClient, "__init__", refuse)
    assert invoke(*command) == (2, f"{option} is wrong.\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "Say what to change: --url"),
        (("--kind", "run-failed", "--all-kinds"), "not both"),
        (("--kind", "run.failed"), f"notifier does not answer at {NOBODY}"),
        (("--kind", "foo"), "'foo' is not one of run-completed, run-failed"),
    ],
)
def test_a_channel_is_changed_by_what_is_said_and_by_no_contradiction(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("PAWL_NOTIFIER_ADDRESS", NOBODY)
    code, output = invoke("notify", "update", "hook_1", *options)
    assert code == 2
    assert told in output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--quiet", "22:00"), "'22:00' are no quiet hours"),
        (("--quiet", "mon- 22:00-07:00"), "'mon-' are no days"),
        (("--quiet", "22:00-07:00", "--no-quiet"), "not both"),
        (("--quiet", "Fri-Mon,wed 22:00-07:00"), f"notifier does not answer at {NOBODY}"),
    ],
)
def test_quiet_hours_are_given_as_people_write_them(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("PAWL_NOTIFIER_ADDRESS", NOBODY)
    code, output = invoke("notify", "preferences", *options)
    assert code == 2
    assert told in output


@pytest.mark.parametrize("elsewhere", ["203.0.113.9:7601", "example.com:7601", "nonsense"])
def test_a_folder_that_somebody_else_made_does_not_send_the_key_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".pawl").mkdir()
    replica = Replica(grpc=elsewhere, metrics="", pid=1, ready=True)
    services = {"agent-loop": [replica]}
    write_endpoints(Endpoints(launcher_pid=os.getpid(), data=".pawl", secrets="", services=services))
    environment = {"PAWL_API_KEY": "key"}
    target = AsyncClient(data=None, environment=environment)
    assert target.agent == ("127.0.0.1:7601",)
    with pytest.raises(StartError, match="No Pawl suite"):
        AsyncClient(data=Path(".pawl"), environment=environment)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nothing", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"model": "m"}', "no list of messages"),
        (b" " * (4 * 1024 * 1024 + 1), "bytes. Leave out the beginning"),
        (b'[{"role": "user", "content": 7}, 8]', "Message 1: content is neither"),
        (b'[{"role": "user", "content": 7}, 8]', "message 2: it is no object"),
        (b'[{"role": "user", "content": "\\ud800"}]', "surrogate"),
        (b'[{"role": "user", "content": "hello"}]', "No Pawl suite answers"),
    ],
)
def test_a_history_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "history.json"
    file.write_bytes(content)
    code, output = invoke("conversations", "import", str(file))
    assert said in output
    assert "Traceback" not in output
    assert code == 2


def test_a_history_that_is_not_there_is_said_to_be_unreadable(tmp_path: Path) -> None:
    code, output = invoke("conversations", "import", str(tmp_path / "absent.json"))
    assert (code, "cannot be read: No such file" in output) == (2, True)


@pytest.mark.parametrize(
    "command", [("run", "caf\udce9"), ("jobs", "show", "\udcff"), ("complete", "t", "--result", '"\udcff"')]
)
def test_what_is_no_text_is_refused_in_words(command: tuple[str, ...]) -> None:
    """As Python has bytes of an argument that are not UTF-8."""
    code, output = invoke("--address", NOBODY, *command)
    assert (code, output.strip()) == (2, "What was given is not a text in UTF-8. Convert it first.")


def test_runs_of_the_last_million_years_are_all_runs() -> None:
    code, output = invoke("--address", NOBODY, "runs", "--since", "365000000d")
    assert code == 2
    assert "No Pawl suite answers" in output, "it was asked"


@pytest.mark.parametrize(
    ("said", "moment"),
    [
        ("2026-01-31", "2026-01-31T00:00:00Z"),
        ("2026-01-31 09:00:00+01:00", "2026-01-31T08:00:00Z"),
        ("2026-01-31T09:00Z", "2026-01-31T09:00:00Z"),
    ],
)
def test_a_moment_is_one_of_the_zone_that_it_says_or_that_the_option_has(said: str, moment: str) -> None:
    assert time_of(said, "since", UTC).ToJsonString() == moment


@pytest.mark.parametrize("said", ["", "soon", "0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00", "2026-02-30"])
def test_what_is_no_moment_is_refused_also_where_a_zone_moves_it_out_of_all_years(said: str) -> None:
    with pytest.raises(CommandError, match="is no time like 2026-01-31T09:00"):
        time_of(said, "since", UTC)
