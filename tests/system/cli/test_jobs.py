"""A job in the background, as a chat and the command line show it (ASYNC-5)."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.system.cli.conftest import CommandLine


class Talk:
    """A chat whose keyboard stays there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        self._keyboard = process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said = ""
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, output: Iterator[str]) -> None:
        for line in output:
            self._lines.put(line)

    def type(self, line: str) -> None:
        self._keyboard.write(f"{line}\n")
        self._keyboard.flush()

    def until(self, pattern: str) -> re.Match[str]:
        """Return what it says, once it has said so; what came before does not count any more."""
        deadline = time.monotonic() + 240
        while (found := re.search(pattern, self.said)) is None:
            try:
                self.said += self._lines.get(timeout=deadline - time.monotonic())
            except queue.Empty:
                raise AssertionError(f"{pattern!r} is not in {self.said!r}") from None
        self.said = self.said[found.end() :]
        return found


@contextmanager
def chat(pawl: CommandLine) -> Iterator[Talk]:
    with subprocess.Popen(
        [sys.executable, "-m", "pawl.cli", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=pawl.environment() | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            talk = Talk(process)
            yield talk
            talk.type("/quit")
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_a_chat_is_told_what_a_job_came_to_while_nobody_says_anything(pawl: CommandLine) -> None:
    with chat(pawl) as talk:
        talk.type("in the background: what is 6 * 7")
        job_id = talk.until(r"with the job (run_\w+)")[1]
        talk.until(rf"The job {job_id} \(calculate\) has ended, completed: 42")
    assert "There are no jobs." in pawl.run("jobs", "list")[2]
    listed = pawl.succeed("jobs", "list", "--all")
    assert re.search(rf'{job_id}\tcompleted\tcalculate\t1 of 1\t\t.*"result":42', listed), listed
    assert '"result":42' in pawl.succeed("jobs", "show", job_id)
