"""What the deployment says of programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pawl.chassis.ids import StoreId
from pawl.chassis.start import StartError
from pawl.tool_registry.adapters.mcp.permission import read_programs_file
from pawl.tool_registry.domain.programs import ProgramRule, objection
from tests.tables import for_each

ACME = StoreId("acme")

TIME = ProgramRule(command=("/opt/time", "--utc"), variables=("TZ",), paths=("/srv/data",))
ANY = ProgramRule(command=("/opt/any", "*"))


def wanted(*command: str, variables: tuple[str, ...] = (), paths: tuple[str, ...] = ()) -> ProgramRule:
    return ProgramRule(command=command, variables=variables, paths=paths)


@for_each(
    "fine",
    [
        wanted("/opt/time", "--utc"),
        wanted("/opt/time", "--utc", variables=("TZ",), paths=("/srv/data", "/srv/data/deep")),
        wanted("/opt/any"),
        wanted("/opt/any", "a", "b"),
    ],
)
def test_what_is_listed_is_allowed(fine: ProgramRule) -> None:
    assert objection({"acme": [TIME, ANY]}, ACME, fine) == ""


@for_each(
    ("refused", "says"),
    [
        (wanted("/opt/time"), "command"),
        (wanted("/opt/time", "--utc", "--more"), "command"),
        (wanted("time", "--utc"), "command"),
        (wanted("/opt/time", "--utc", variables=("LD_PRELOAD",)), "LD_PRELOAD"),
        (wanted("/opt/time", "--utc", paths=("/srv",)), "/srv"),
        (wanted("/opt/time", "--utc", paths=("/srv/database",)), "/srv/database"),
        (wanted("/opt/any", paths=("/",)), "/"),
    ],
)
def test_what_is_not_listed_is_refused(refused: ProgramRule, says: str) -> None:
    assert says in objection({"acme": [TIME, ANY]}, ACME, refused)


def test_stores_without_rules_have_those_of_all_and_nothing_else() -> None:
    rules = {"acme": [TIME], "*": [ANY]}
    assert objection(rules, StoreId("other"), wanted("/opt/any")) == ""
    assert objection(rules, ACME, wanted("/opt/any"))
    assert objection({}, ACME, wanted("/opt/any"))


def test_without_a_file_nothing_is_listed(tmp_path: Path) -> None:
    assert read_programs_file(None) == {}
    path = tmp_path / "programs.json"
    path.write_text('{"acme": [{"command": ["/opt/time", "*"], "paths": ["/srv"]}]}')
    assert read_programs_file(path) == {"acme": [ProgramRule(command=["/opt/time", "*"], variables=[], paths=["/srv"])]}


@for_each(
    ("text", "says"),
    [
        ("[]", "must be JSON like"),
        ('{"*": [{"command": ["time"]}]}', "absolute path of a program"),
        ('{"*": [{"command": []}]}', "absolute path of a program"),
        ('{"*": [{"command": ["/a"], "paths": ["srv"]}]}', "paths are absolute"),
        ('{"*": [{"command": ["/a"], "paths": ["/srv/../etc"]}]}', "paths are absolute"),
        ('{"*": [{"command": ["/a"], "folders": []}]}', "unknown field"),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "programs.json"
    path.write_text(text)
    with pytest.raises(StartError, match=says):
        read_programs_file(path)
