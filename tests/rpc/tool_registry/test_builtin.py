"""The built-in tools, through the wire: time, tasks, mail, stored results. TOOL-7, LOOP-8, LOOP-9."""

from __future__ import annotations

import asyncio
import email
import email.policy
from collections.abc import AsyncIterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiosmtpd.smtp import SMTP, Envelope

from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.mail import read_smtp_url
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_client import open_channel
from pawl.chassis.rpc_server import RpcServer
from pawl.errors import CallNotFound
from pawl.event.v1 import call_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceServicer, add_LedgerServiceServicer_to_server
from pawl.tool_registry.adapters.ledger import LedgerReads
from pawl.tool_registry.adapters.mail.smtp import OutboxFolder, SmtpMailer
from pawl.tool_registry.adapters.postgres.planning import PostgresPlanRepository
from pawl.tool_registry.builtin.clock import clock_tools
from pawl.tool_registry.builtin.mail import Mailer, mail_tools
from pawl.tool_registry.builtin.planning import planning_tools
from pawl.tool_registry.builtin.stored_results import result_tools
from tests.fakes.anybody import Anybody
from tests.fakes.manual_clock import ManualClock
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, reason, running

LETTER = {"to": ["ann@example.com"], "subject": "Lunch på fredag?", "body": "At noon.\nBring cake."}


@pytest.fixture
async def planning(database_url: str, tmp_path: Path, ids: IdSource) -> Any:
    async with Database(database_url, application_name="test") as database:
        tools = planning_tools(PostgresPlanRepository(database), ids)
        async with running(database_url, tmp_path, tools) as registry:
            yield registry


async def test_a_subtask_finds_the_task_made_just_before_by_title_or_id(planning: Registry) -> None:
    """LOOP-9."""
    made = content(await planning.run("create_task", {"title": "Party", "due": "2026-12-24"}, call="a"))
    assert made["due"] == "2026-12-24"
    by_title = content(await planning.run("add_subtask", {"parent": "party", "title": "Cake"}, call="b"))
    by_id = content(await planning.run("add_subtask", {"parent": made["task_id"], "title": "Music"}, call="c"))
    assert by_title["parent"] == by_id["parent"] == {"task_id": made["task_id"], "title": "Party"}
    (project,) = content(await planning.run("list_projects", call="d"))["projects"]
    assert project["title"] == "Inbox"
    (task,) = project["tasks"]
    assert [subtask["title"] for subtask in task["subtasks"]] == ["Cake", "Music"]


async def test_the_same_call_makes_one_task(planning: Registry) -> None:
    """IDEMPOTENT: run again with the same key, it has its effect once."""
    first = await planning.run("create_task", {"title": "Party", "project": "Home"})
    again = await planning.run("create_task", {"title": "Party", "project": "Home"}, earlier_attempts=1)
    assert content(first)["task_id"] == content(again)["task_id"]
    (project,) = content(await planning.run("list_projects", call="l"))["projects"]
    assert len(project["tasks"]) == 1


async def test_projects_are_found_in_any_case_and_near_titles_are_told(planning: Registry) -> None:
    first = content(await planning.run("create_task", {"title": "a", "project": "Home"}, call="a"))
    assert first["project_created"]
    same = content(await planning.run("create_task", {"title": "b", "project": "HOME"}, call="b"))
    assert same["project"] == first["project"]
    near = content(await planning.run("create_task", {"title": "c", "project": "Hom"}, call="c"))
    assert (near["project_created"], near["similar_projects"]) == (True, ["Home"])
    by_id = {"title": "d", "project": first["project"]["project_id"]}
    assert content(await planning.run("create_task", by_id, call="d"))["project"] == first["project"]


async def test_tasks_made_at_once_in_a_new_project_share_it(planning: Registry) -> None:
    made = await asyncio.gather(
        *(planning.run("create_task", {"title": f"t{n}", "project": "New"}, call=f"c{n}") for n in range(6))
    )
    assert len({content(result)["project"]["project_id"] for result in made}) == 1


async def test_an_unknown_parent_is_an_error_with_near_matches(planning: Registry) -> None:
    await planning.run("create_task", {"title": "Party"}, call="a")
    failed = await planning.run("add_subtask", {"parent": "Prty", "title": "Cake"}, call="b")
    assert outcome(failed) == "FAILED TOOL_ERROR"
    assert "did you mean 'Party'?" in content(failed)["error"]


async def test_a_subtask_lands_under_the_task_of_its_own_run(planning: Registry) -> None:
    """Runs of one user make tasks of the same title at the same time."""
    runs = [context(run=f"run{number}") for number in range(4)]

    async def create(number: int) -> str:
        made = await planning.run("create_task", {"title": "Party"}, call=f"t{number}", who=runs[number])
        return str(content(made)["task_id"])

    async def add(number: int) -> str:
        added = await planning.run(
            "add_subtask", {"parent": "Party", "title": "Cake"}, call=f"s{number}", who=runs[number]
        )
        return str(content(added)["parent"]["task_id"])

    made = await asyncio.gather(*map(create, range(4)))
    assert await asyncio.gather(*map(add, range(4))) == made


async def test_of_several_tasks_of_a_title_none_is_guessed(planning: Registry) -> None:
    for number, project in enumerate(("Home", "Work")):
        task = {"title": "Party", "project": project}
        await planning.run("create_task", task, call=f"c{number}", who=context(run=f"earlier{number}"))
    failed = await planning.run("add_subtask", {"parent": "Party", "title": "Cake"}, call="a")
    assert outcome(failed) == "FAILED TOOL_ERROR"
    assert "2 tasks have the title 'Party'" in content(failed)["error"]
    named = {"parent": "Party", "title": "Cake", "project": "work"}
    added = content(await planning.run("add_subtask", named, call="b"))
    listed = content(await planning.run("list_projects", call="l"))["projects"]
    (task,) = next(project["tasks"] for project in listed if project["title"] == "Work")
    assert task["task_id"] == added["parent"]["task_id"]
    absent = await planning.run("add_subtask", named | {"parent": "Gift"}, call="d")
    assert "there is no task with the id or title 'Gift' in that project" in content(absent)["error"]


async def test_plans_belong_to_their_user_and_store(planning: Registry) -> None:
    """I13."""
    await planning.run("create_task", {"title": "Party"}, call="a")
    for number, who in enumerate([context(user="bob"), context(store="other")]):
        assert content(await planning.run("list_projects", call=f"l{number}", who=who)) == {"projects": []}
        failed = await planning.run("add_subtask", {"parent": "Party", "title": "x"}, call=f"s{number}", who=who)
        assert content(failed) == {"error": "there is no task with the id or title 'Party'"}


async def test_the_time_is_that_of_the_zone_asked_for(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with running(database_url, tmp_path, clock_tools(clock)) as registry:
        utc = content(await registry.run("get_current_time", call="a"))
        oslo = content(await registry.run("get_current_time", {"timezone": "europe/oslo"}, call="b"))
        assert utc == {
            "time": "2027-01-15T08:00:00+00:00", "weekday": "Friday", "timezone": "UTC", "abbreviation": "UTC"
        }  # fmt: skip
        assert (oslo["time"], oslo["timezone"]) == ("2027-01-15T09:00:00+01:00", "Europe/Oslo")
        for text, hint in [("Oslo", "Europe/Oslo"), ("Europe/Olso", "Europe/Oslo"), ("../etc/passwd", "IANA")]:
            failed = await registry.run("get_current_time", {"timezone": text}, call="c")
            assert outcome(failed) == "FAILED TOOL_ERROR"
            assert hint in content(failed)["error"]


class Postbox:
    """A mail server's end."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: Any) -> str:
        if address.startswith("nobody"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:
        self.envelopes.append(envelope)
        return "250 OK"

    def message(self) -> EmailMessage:
        """The one message that came."""
        (envelope,) = self.envelopes
        assert isinstance(envelope.content, bytes)
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        return message


@pytest.fixture
async def postbox() -> AsyncIterator[tuple[Postbox, str]]:
    postbox = Postbox()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(postbox, hostname="mail.example.org", loop=loop), "127.0.0.1", 0)
    async with server:
        yield postbox, f"smtp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def mailing(database_url: str, folder: Path, mailer: Mailer, clock: ManualClock) -> Any:
    return running(database_url, folder, mail_tools(mailer, clock, sender="pawl@example.org"))


async def test_mail_is_shown_approved_and_sent_once(
    database_url: str, tmp_path: Path, clock: ManualClock, postbox: tuple[Postbox, str]
) -> None:
    """HITL-2: send_email is sensitive; AT_MOST_ONCE: asked again, it is not sent again."""
    box, url = postbox
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url(url)), clock) as registry:
        verdict = await registry.check("send_email", LETTER)
        assert verdict.approval_cause == "category SENSITIVE"
        assert verdict.preview == "To: ann@example.com\nSubject: Lunch på fredag?\n\nAt noon.\nBring cake."
        sent = await registry.run_approved("send_email", LETTER)
        assert content(sent)["sent"] is True
        assert await registry.run_approved("send_email", LETTER) == sent
    assert box.message()["To"] == "ann@example.com"
    assert box.message()["From"] == "pawl@example.org"
    assert box.message()["Subject"] == "Lunch på fredag?"
    assert box.message()["Message-ID"] == content(sent)["message_id"]
    assert box.message().get_content().splitlines() == ["At noon.", "Bring cake."]


async def test_copies_go_to_everybody_and_count_as_bulk(
    database_url: str, tmp_path: Path, clock: ManualClock, postbox: tuple[Postbox, str]
) -> None:
    box, url = postbox
    letter = LETTER | {"to": ["ann@example.com", "bo@example.com"], "cc": ["cy@example.com", "nobody@example.com"]}
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url(url)), clock) as registry:
        assert (await registry.check("send_email", letter)).approval_cause == "category SENSITIVE, bulk of 4"
        assert content(await registry.run_approved("send_email", letter))["refused"] == ["nobody@example.com"]
    assert box.envelopes[0].rcpt_tos == ["ann@example.com", "bo@example.com", "cy@example.com"]
    assert box.message()["Cc"] == "cy@example.com, nobody@example.com"


async def test_a_letter_to_five_is_bulk_and_what_a_reviewer_made_of_it_is_what_is_sent(
    database_url: str, tmp_path: Path, clock: ManualClock, postbox: tuple[Postbox, str]
) -> None:
    """HITL-2, HITL-3."""
    box, url = postbox
    five = [f"{name}@example.com" for name in ("ann", "bo", "cy", "di", "ed")]
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url(url)), clock) as registry:
        written = await registry.check("send_email", LETTER | {"to": five[:4], "cc": [*five[3:], "ann@example.com"]})
        assert written.approval_cause == "category SENSITIVE, bulk of 5"
        assert written.preview.startswith(f"To: {', '.join(five[:4])}\nCc: di@example.com, ed@example.com,")
        edited = LETTER | {"to": five[:2], "body": "At one."}
        again = await registry.check("send_email", edited)
        assert (again.approval_cause, again.preview.endswith("At one.")) == ("category SENSITIVE", True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await registry.run("send_email", edited, approved_digest=written.digest)
        assert reason(error.value)[1] == "APPROVAL_REQUIRED"
        assert content(await registry.run("send_email", edited, approved_digest=again.digest))["sent"] is True
    (envelope,) = box.envelopes
    assert envelope.rcpt_tos == five[:2]
    assert box.message().get_content().strip() == "At one."


@pytest.mark.parametrize(
    "change",
    [
        {"to": ["ann@example.com\r\nBcc: eve@example.com"]},
        {"to": ["ann@example.com, eve@example.com"]},
        {"to": ["Ann <ann@example.com>"]},
        {"to": ["ann"]},
        {"to": ["ann@localhost"]},
        {"to": ["a@b@example.com>"]},
        {"subject": "Hi\r\nBcc: eve@example.com"},
        {"subject": "Hi\x0bthere"},
        {"subject": "=?utf-8?q?=0D=0ABcc:_eve@example.com?="},
        {"to": ["=?utf-8?q?a?=@example.com"]},
        {"cc": ["eve@exa mple.com"]},
    ],
)
async def test_nothing_of_an_argument_becomes_a_header_of_its_own(
    database_url: str, tmp_path: Path, clock: ManualClock, postbox: tuple[Postbox, str], change: dict[str, Any]
) -> None:
    box, url = postbox
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url(url)), clock) as registry:
        assert outcome(await registry.run_approved("send_email", LETTER | change)) == "FAILED TOOL_ERROR"
    assert box.envelopes == []


async def test_what_the_mail_server_refuses_is_said(
    database_url: str, tmp_path: Path, clock: ManualClock, postbox: tuple[Postbox, str]
) -> None:
    box, url = postbox
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url(url)), clock) as registry:
        refused = await registry.run_approved("send_email", LETTER | {"to": ["nobody@example.com"]}, call="a")
        assert "nobody@example.com (550)" in content(refused)["error"]
    assert box.envelopes == []
    async with mailing(database_url, tmp_path, SmtpMailer(read_smtp_url("smtp://127.0.0.1:9")), clock) as registry:
        failed = await registry.run_approved("send_email", LETTER, call="b")
        assert content(failed) == {"error": "the mail server cannot be reached; nothing was sent"}


async def test_without_a_mail_server_the_message_is_put_in_the_outbox_and_that_is_said(
    database_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    folder = tmp_path / "outbox"
    async with mailing(database_url, tmp_path, OutboxFolder(folder), clock) as registry:
        put = content(await registry.run_approved("send_email", LETTER, call="c1"))
    assert (put["sent"], put["outbox"]) == (False, "acme/c1.eml")
    assert "PAWL_SMTP_URL" in put["note"]
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    assert path == folder / "acme/c1.eml"
    assert path.stat().st_mode & 0o777 == 0o600
    message = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    assert message["Subject"] == "Lunch på fredag?"


@pytest.mark.parametrize("url", ["http://x", "smtp://", "smtp:x", "smtp://host/path", "host:25"])
def test_a_malformed_mail_server_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="must be smtp://") as error:
        read_smtp_url(url)
    assert url not in str(error.value).replace("smtp://,", "")


def test_a_mail_server_is_read_from_its_url() -> None:
    server = read_smtp_url("smtps://us%40er:p%2Fw@mail.example.com")
    assert (server.host, server.port, server.username, server.password) == ("mail.example.com", 465, "us@er", "p/w")
    assert (server.use_tls, server.start_tls) == (True, False)
    assert read_smtp_url("smtp+starttls://h").start_tls is True
    assert read_smtp_url("smtp://h:2525").port == 2525


class Ledger(LedgerServiceServicer):
    """Has one call, of ann's conversation in acme."""

    def __init__(self, content_json: bytes) -> None:
        self._content_json = content_json

    async def GetCall(
        self, request: ledger_pb2.GetCallRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ledger_pb2.GetCallResponse:
        if (request.store_id, request.user_id) != ("acme", "ann") or request.call_id not in {"big", "open"}:
            raise CallNotFound
        result = call_pb2.CallResult(content_json=self._content_json) if request.call_id == "big" else None
        return ledger_pb2.GetCallResponse(call=call_pb2.Call(conversation_id="conversation", result=result))


async def test_the_rest_of_a_cut_result_is_read_piece_by_piece(
    database_url: str, tmp_path: Path, ids: IdSource
) -> None:
    """LOOP-8."""
    whole = '"' + "abcdefghé" * 100 + '"'
    server = RpcServer(f"unix:{tmp_path}/ledger", authenticator=Anybody(), ids=ids, metrics=Metrics("ledger"))
    server.add(add_LedgerServiceServicer_to_server, Ledger(whole.encode()))  # type: ignore[abstract]  # one method is enough
    async with (
        server,
        open_channel(server.address) as channel,
        running(database_url, tmp_path, result_tools(LedgerReads(channel))) as registry,
    ):
        text, number = "", 0
        offset: int | None = 0
        while offset is not None:
            arguments = {"call_id": "big", "offset": offset, "length": 97}
            piece = content(await registry.run("read_result", arguments, call=f"c{number}"))
            text, offset, number = text + piece["text"], piece["next_offset"], number + 1
        assert text == whole
        torn = content(await registry.run("read_result", {"call_id": "big", "offset": 10}, call="torn"))
        assert torn["text"].startswith("é")
        beyond = content(await registry.run("read_result", {"call_id": "big", "offset": 10**6}, call="beyond"))
        assert (beyond["text"], beyond["next_offset"]) == ("", None)
        for number, (call_id, who) in enumerate(
            [
                ("open", context()),
                ("none", context()),
                ("big", context(user="bob")),
                ("big", context(store="other")),
            ]
        ):
            failed = await registry.run("read_result", {"call_id": call_id}, call=f"f{number}", who=who)
            assert outcome(failed) == "FAILED TOOL_ERROR"
        foreign = context()
        foreign.conversation_id = "another"
        failed = await registry.run("read_result", {"call_id": "big"}, call="foreign", who=foreign)
        assert outcome(failed) == "FAILED TOOL_ERROR"
