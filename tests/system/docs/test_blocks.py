"""Every code block of the public pages works, in order, in an empty folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import open_folder
from tests.system.docs.pages import Block, Reader, blocks

# A page starts a suite or two, and dozens of programs.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[3] / "docs"
# Consecutive pages share a folder and, if they start it with the same command, a suite.
PAGES = (
    (
        *("guides/conversations.md", "guides/gateway.md", "reference/nats.md", "guides/triggers.md"),
        *("guides/schedules.md", "reference/python-client.md", "guides/apply.md"),
    ),
    ("guides/agents.md", "guides/builtin-tools.md", "guides/approvals.md"),
    ("guides/from-node.md", "../web/client/README.md", "guides/frontends.md"),
    ("start/quickstart.md", "guides/identity.md"),
    ("guides/notifications.md",),
    ("guides/tools.md",),
    ("guides/background.md",),
    ("guides/workflows.md",),
    ("guides/tool-sources.md",),
    ("start/tutorial.md",),
    ("start/first-tool.md",),
    ("start/first-approval.md",),
    ("guides/goals.md",),
)
NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")
# First lines of blocks that are not run, and why.
NOT_RUN = {
    "PAWL_EGRESS_FILE=egress.json PAWL_MAILBOX_PASSWORDS_FILE=passwords.json pawl up": "needs the reader's mail server",
    'cp -r "$REPO/docs/examples/copilotkit" copilotkit': "needs a thousand packages of npm",
    "cd copilotkit && PAWL_KEY=$(cat ../.pawl/secrets/local-key) node server.mjs 9001": "needs them, too",
    "python3 -m venv .venv": "tests/system/launcher/test_wheels.py installs Pawl in this way",
    "pip install mcp-server-time": "needs the network; the test environment has it installed",
}


def with_output(page: Path) -> Iterator[tuple[Block, Block | None]]:
    found = list(blocks(page))
    for number, block in enumerate(found):
        if block.language == "text":
            assert found[number - 1].language == "sh", f"{page.name}:{block.line} is an output block without a command"
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        yield block, after if after is not None and after.language == "text" else None


@pytest.mark.parametrize("names", PAGES, ids=" ".join)
def test_code_blocks_of_a_page_work_in_order(names: tuple[str, ...]) -> None:
    with open_folder() as folder, Reader(folder) as reader:
        for name in names:
            reader.turn_page()
            for block, output in with_output(DOCS / name):
                if block.first_line in NOT_RUN:
                    continue
                if "openssl" in block.text and shutil.which("openssl") is None:
                    pytest.skip("the commands make certificates by openssl")
                try:
                    reader.follow(block, output)
                except AssertionError as error:
                    if "npm install" in block.text and any(code in str(error) for code in NO_NETWORK):
                        pytest.skip("npm cannot reach a registry")
                    raise AssertionError(f"{name}:{block.line}: {block.first_line}\n{error}") from None


def test_every_excluded_block_exists() -> None:
    first_lines = {block.first_line for names in PAGES for name in names for block in blocks(DOCS / name)}
    assert NOT_RUN.keys() <= first_lines
