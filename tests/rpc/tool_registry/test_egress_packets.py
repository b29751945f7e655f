"""To what is refused not one packet is sent: the kernel says so, in a network where every address answers. TOOL-7."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.rpc.tool_registry.egress_namespace import METADATA, PUBLIC
from tests.tidy import tree

ENTER = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the program in the namespace found."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("there is no unshare or no ip on this machine: no network namespace can be made")
    allowed = subprocess.run([*ENTER, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"this user may not make network namespaces: {allowed.stderr.strip()}")
    ran = subprocess.run(
        [*ENTER, sys.executable, "-m", "tests.rpc.tool_registry.egress_namespace"],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_the_kernel_sent_no_packet_to_what_is_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"] == ["refused"]
    assert seen["sent_to_refused"] == 0


def test_without_the_guard_there_would_have_been_one(seen: dict[str, Any]) -> None:
    assert seen["sent_to_public"] > 0
    assert (seen["public"], seen["unguarded"]) == ("hello", "hello")
    assert seen["controls"] == [PUBLIC, METADATA]


def test_a_redirect_and_a_name_that_changes_lead_nowhere_else(seen: dict[str, Any]) -> None:
    assert (seen["redirected"], seen["rebound"]) == ("refused", "hello")
    assert seen["reached"] == [PUBLIC, PUBLIC]
    assert seen["rebinds_asked"] == 1
