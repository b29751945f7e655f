"""The process of a service: start, loops, tasks, logs and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from pawl.chassis.process import tasks
from pawl.chassis.process.start import StartError
from pawl.errors import DeadlineExceeded, DependencyUnavailable, Internal
from pawl.server.process import log_setup
from pawl.server.process.service import Background, Service
from pawl.server.process.settings import ServiceSettings
from pawl.server.rpc.server import RpcServer
from tests.fakes.manual_clock import run_in_virtual_time
from tests.keys import ENVIRONMENT
from tests.tables import for_each

PROGRAM = """
import asyncio
from pawl.chassis.process.start import StartError
from pawl.server.process import log_setup
from pawl.server.process.service import run_service

async def main(stop):
    log_setup.configure(service="test", instance_id="i-1", level="info", log_format="json")
    print("running", flush=True)
    {body}

run_service(main)
"""


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str) -> tuple[int, str]:
    process = start(body)
    _, log = process.communicate(timeout=60)
    return process.returncode, log


@for_each(
    ("number", "body", "code"),
    [
        (signal.SIGINT, "await stop.wait()", 0),
        (signal.SIGTERM, "await stop.wait(); print('waiting', flush=True); await asyncio.Event().wait()", 128 + 15),
    ],
)
def test_a_signal_stops_the_process_and_a_second_one_kills_it(number: Any, body: str, code: int) -> None:
    """OPS-5: the log names the signal."""
    process = start(body)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    if code:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == code, log
    assert number.name in log


def test_a_process_that_cannot_start_gives_one_clear_error() -> None:
    code, log = run("1 / 0")
    assert (code, "ZeroDivisionError" in log) == (1, True), "a crash is logged with its traceback"
    code, log = run('raise StartError("the port is in use")')
    assert code == 2
    assert "the port is in use" in log
    assert "Traceback" not in log


def test_an_unhandled_task_failure_is_logged_and_sets_the_exit_code() -> None:
    code, log = run("""
    async def fail():
        raise RuntimeError("lost")
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    """)
    assert (code, '"event":"task.failed"' in log, "RuntimeError" in log) == (1, True, True), log


def test_a_failed_loop_is_restarted_and_logged_once_per_outage() -> None:
    errors: list[Exception] = [DependencyUnavailable(), DeadlineExceeded(), Internal(), RuntimeError("crash")]

    async def main() -> None:
        again, left = asyncio.Event(), iter(errors)

        async def loop() -> None:
            for error in left:
                raise error
            again.set()

        async with Background() as background:
            background.start("loop", loop)
            await again.wait()

    with structlog.testing.capture_logs() as lines:
        run_in_virtual_time(main())
    found = [(line["event"].removeprefix("background."), line["log_level"], "exc_info" in line) for line in lines]
    warned, quiet = ("interrupted", "warning", False), ("interrupted", "debug", False)
    assert found == [warned, quiet, quiet, ("crashed", "error", True)]


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the logging of the test process unchanged, and give a service its keys."""
    monkeypatch.setattr(log_setup, "configure", lambda **_: None)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


class Part:
    def __init__(self, name: str, order: list[str]) -> None:
        self._name = name
        self._order = order

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, *_: object) -> None:
        self._order.append(self._name)


async def test_a_service_shuts_down_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service drains calls, then stops the loops, then closes their dependencies. Calls may wait for a loop."""
    order: list[str] = []

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("loop")

    async def drained(self: RpcServer, *_: object) -> None:
        await stop_serving(self)
        order.append("server")

    stop_serving = RpcServer.__aexit__
    monkeypatch.setattr(RpcServer, "__aexit__", drained)
    stop = asyncio.Event()
    stop.set()
    async with Service("test", ServiceSettings()) as service:
        await service.enter(Part("database", order))
        await service.enter(Part("bus", order))
        service.background.start("loop", loop)
        await service.serve(service.rpc_server(), stop)
    assert order == ["server", "loop", "bus", "database"]


async def test_a_reachable_service_without_tls_warns_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proxy in front of the service may terminate TLS, so this is no error."""
    monkeypatch.delenv("PAWL_LOCAL_KEY")
    (tmp_path / "keys.json").write_text("[]")
    stop = asyncio.Event()
    stop.set()
    for listens, warnings in (("0.0.0.0:0", 1), ("127.0.0.1:0", 0)):
        settings = ServiceSettings(metrics_listen=listens, api_keys_file=tmp_path / "keys.json")
        with structlog.testing.capture_logs() as lines:
            async with Service("test", settings) as service:
                await service.serve(service.rpc_server(), stop)
        assert [line["event"] for line in lines].count("tls.absent") == warnings


async def test_a_service_without_a_database_url_reports_it() -> None:
    async with Service("test", ServiceSettings()) as service:
        with pytest.raises(StartError, match="PAWL_DATABASE_URL is required"):
            await service.open_database()


async def test_a_service_waits_for_peers_that_are_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix:{tmp_path}/peer"
    for seconds, is_there in ((120.0, True), (0.1, False)):
        monkeypatch.setattr("pawl.server.process.service._PEERS_SECONDS", seconds)
        peer = Service("peer", ServiceSettings(listen=address)).rpc_server()
        async with Service("test", ServiceSettings()) as service:
            opening = asyncio.create_task(service.open_channel("peer", address))
            await asyncio.sleep(0)
            assert not opening.done()
            async with peer if is_there else contextlib.nullcontext():
                channel = await opening
                assert (channel.get_state() == grpc.ChannelConnectivity.READY) == is_there


@pytest.mark.parametrize("service", ["agent_loop", "gateway", "job_store", "notifier", "tool_registry"])
def test_a_service_loads_only_the_libraries_it_needs(service: str) -> None:
    """Libraries for issuer tokens, colours and model calls would cost every process megabytes."""
    large = {"cryptography", "joserfc", "rich"}
    large |= {"aiohttp", "openai"} if service != "agent_loop" else set()
    program = f"import sys, pawl.{service}.__main__; print(*{large} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == []


PROGRAM_OF_LOGS = """
import asyncio, logging, warnings
from pawl.chassis.process import logs
from pawl.server.process import log_setup
log = logs.get_logger("early")
log_setup.configure(service="test", instance_id="i-1", level="info", log_format="{log_format}")
{body}
"""


def run_of_logs(body: str, log_format: str = "json") -> str:
    program = PROGRAM_OF_LOGS.format(body=body, log_format=log_format)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def lines(body: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_of_logs(body).splitlines()]


def test_each_log_line_is_a_json_object_with_the_bound_ids() -> None:
    first, second, late, old = lines("""
async def work(run):
    log_setup.bind(run=run)
    await asyncio.sleep(0)
    log.info("run.claimed", epoch=7, what=2+1j)
async def main():
    await asyncio.gather(work("a"), work("b"))
asyncio.run(main())
logging.getLogger("lib").warning("late by %d s", 3)
warnings.warn("old")
logging.getLogger("httpx2").info("GET /")
log.debug("hidden")
logging.getLogger("asyncpg.pool").warning("Failed to restore")
""")
    assert first.pop("timestamp").endswith("Z")
    process = {"service": "test", "instance": "i-1", "level": "info", "module": "early"}
    assert first == {"event": "run.claimed", "epoch": 7, "what": "(2+1j)", "run": "a"} | process
    assert second["run"] == "b"
    assert (late["event"], late["logger"], late["level"]) == ("late by 3 s", "lib", "warning")
    assert "old" in old["event"]


def test_a_program_other_than_a_service_logs_through_logging() -> None:
    program = "from pawl.chassis.process import logs; logs.get_logger('lib').warning('tool.failed', tool='charge')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "tool.failed tool='charge'\n"


def test_a_traceback_does_not_show_local_variables() -> None:
    """I22: local variables may contain keys."""
    body = """
def sign(key):
    raise ValueError("bad")
try:
    sign("hunter" + str(1 + 1))
except ValueError:
    log.exception("sign.failed")
    logging.getLogger("lib").exception("failed")
"""
    for log_format in ("json", "console"):
        text = run_of_logs(body, log_format)
        assert (text.count("ValueError: bad"), "hunter2" in text) == (2, False), log_format


ENTRIES = [
    *(f"pawl.{name}.__main__" for name in ("agent_loop", "job_store", "notifier", "tool_registry")),
    "pawl.cli.command",
    "pawl.worker",
]
# Stops where gRPC reads the variable at import; setting it later has no effect.
PROGRAM_OF_FORK_SUPPORT = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import {}
"""


def test_fork_support_is_off_before_grpc_is_imported() -> None:
    settings = {
        entry: subprocess.check_output([sys.executable, "-c", PROGRAM_OF_FORK_SUPPORT.format(entry)], text=True).strip()
        for entry in ENTRIES
    }
    assert settings == dict.fromkeys(ENTRIES, "false")


async def test_a_lost_cancellation_is_detected() -> None:
    async def lose() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        tasks.check_cancelled()
        raise AssertionError

    task = asyncio.create_task(lose())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert task.cancelled()


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", 0.01)
    losses = 3

    async def stubborn() -> None:
        nonlocal losses
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if not losses:
                    raise
                losses -= 1

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert task.cancelled()
    assert losses == 0


@pytest.fixture
async def unseen() -> list[Any]:
    """Exceptions that the event loop reports as never retrieved."""
    found: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def test_shielded_work_outlives_its_caller_and_its_error_is_handled(unseen: list[Any]) -> None:
    resume, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await resume.wait()
        ended.set()
        raise ValueError("too late")

    caller = asyncio.create_task(tasks.shield(work()))
    await asyncio.sleep(0)
    await tasks.end([caller])
    gc.collect()
    resume.set()
    await ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert not unseen
