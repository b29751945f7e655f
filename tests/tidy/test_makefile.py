from __future__ import annotations

import re
import subprocess
import tomllib

from tests.tidy import tree

MAKEFILE = (tree.ROOT / "Makefile").read_text()


def test_help_is_the_default_and_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make", "-C", tree.ROOT], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == phony[1].split()


def test_every_target_that_is_not_a_file_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE) == phony[1].split()


def test_each_test_is_run_by_exactly_one_of_two_targets() -> None:
    """The mark `long` selects the target. CI runs `make test` and the long tests with the mark `ci`."""
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n\t@(.*)$", MAKEFILE, re.MULTILINE))
    marks = {"test": "not long", "test-long": "long", "test-ci": "ci"}
    assert {target: recipes[target] for target in marks} == {
        target: f'$(TESTS) -m "{mark}" $(ARGS)' for target, mark in marks.items()
    }
    command = re.search(r"^TESTS := (.*)$", MAKEFILE, re.MULTILINE)
    assert command is not None
    options = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    leave_out = {"-m", "-k", "--ignore", "--ignore-glob", "--deselect"}
    assert not leave_out & {*command[1].removeprefix("$(BIN)/python -m $(PYTEST) ").split(), *options["addopts"]}
    assert options["testpaths"] == ["tests"]
    ran = (tree.ROOT / ".ci/run").read_text().splitlines()
    assert {"make test PYTEST=tests.twice", "make test-ci PYTEST=tests.twice"} <= set(ran)
