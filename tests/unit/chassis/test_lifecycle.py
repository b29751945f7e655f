"""Start and stop, as a real process sees them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import structlog

from pawl.chassis.lifecycle import Background
from pawl.errors import DeadlineExceeded, DependencyUnavailable, Internal
from tests.fakes import virtual_time

PROGRAM = """
import asyncio
from pawl.chassis import logs
from pawl.chassis.lifecycle import run_service
from pawl.chassis.start import StartError

async def main(stop):
    logs.configure(service="test", instance_id="i-1", level="info", log_format="json")
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
    """Return the exit code and the log of a process."""
    process = start(body)
    _, log = process.communicate(timeout=60)
    return process.returncode, log


def test_a_signal_asks_the_process_to_end_and_a_second_one_ends_it_at_once() -> None:
    """OPS-5."""
    for number, body, code in (
        (signal.SIGINT, "await stop.wait()", 0),
        (signal.SIGTERM, "await stop.wait(); print('waiting', flush=True); await asyncio.Event().wait()", 128 + 15),
    ):
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


def test_a_process_that_cannot_start_says_why_in_one_sentence() -> None:
    code, log = run('raise StartError("the port is in use")')
    assert code == 2
    assert "the port is in use" in log
    assert "Traceback" not in log


def test_a_task_that_fails_unseen_is_logged_and_told_by_the_exit_code() -> None:
    code, log = run("""
    async def fail():
        raise RuntimeError("lost")
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    """)
    assert (code, '"event":"task.failed"' in log, "RuntimeError" in log) == (1, True, True), log


async def test_a_loop_that_fails_is_started_again_and_in_one_line_while_its_dependency_is_away() -> None:
    again = asyncio.Event()
    errors: list[Exception] = [DependencyUnavailable(), DeadlineExceeded(), Internal(), RuntimeError("crash")]
    left = iter(errors)

    async def loop() -> None:
        for error in left:
            raise error
        again.set()
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as lines:
        async with Background() as background:
            background.start("loop", loop)
            await again.wait()
    interrupted = [line["event"] == "background.interrupted" and "exc_info" not in line for line in lines]
    assert interrupted == [True, True, True, False]


def test_a_loop_that_ran_well_for_long_starts_again_at_once() -> None:
    """Also after many crashes in a row: that is over."""

    async def main() -> list[float]:
        clock = asyncio.get_running_loop()
        pauses: list[float] = []
        ended_at = clock.time()
        done = asyncio.Event()

        async def loop() -> None:
            nonlocal ended_at
            pauses.append(round(clock.time() - ended_at, 2))
            if len(pauses) > 7:
                done.set()
                await asyncio.Event().wait()
            await asyncio.sleep(31.0 if len(pauses) == 6 else 0.0)
            ended_at = clock.time()
            raise DependencyUnavailable

        async with Background() as background:
            background.start("loop", loop)
            await done.wait()
        return pauses

    assert virtual_time.run(main()) == [0.0, 0.1, 0.5, 1.0, 5.0, 5.0, 0.1, 0.5]


async def test_loops_are_cancelled_at_the_end_and_may_clean_up() -> None:
    began = asyncio.Event()
    cleaned = False

    async def loop() -> None:
        nonlocal cleaned
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    async with Background() as background:
        background.start("loop", loop)
        await began.wait()
    assert cleaned
