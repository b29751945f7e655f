"""The Makefile explains itself."""

from __future__ import annotations

import re
import subprocess

from tests.tidy import tree

MAKEFILE = (tree.ROOT / "Makefile").read_text()


def test_help_is_the_default_and_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make", "-C", tree.ROOT], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == phony[1].split()


def test_every_target_that_is_not_a_file_is_declared_so() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE) == phony[1].split()
