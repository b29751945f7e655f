"""The contract, its stubs and the tools that watch over both."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.tidy import tree

PROTO = tree.ROOT / "proto"
BUF = Path(sys.executable).parent / "buf"


def project(folder: str = ".") -> dict[str, Any]:
    return tomllib.loads((tree.ROOT / folder / "pyproject.toml").read_text())


def test_protos_lie_where_their_package_says_and_carry_no_options_of_other_languages() -> None:
    for path in PROTO.rglob("*.proto"):
        source = path.read_text()
        package = path.parent.relative_to(PROTO).as_posix().replace("/", ".")
        assert f"\npackage {package};\n" in source, path
        assert not re.search(r"^option \w+_(package|prefix|namespace)", source, re.MULTILINE), path


def test_a_breaking_change_is_caught(tmp_path: Path) -> None:
    """`make proto-check` would refuse a field that changes its type."""
    shutil.copytree(PROTO, tmp_path, dirs_exist_ok=True)
    victim = next(path for path in sorted(tmp_path.rglob("*.proto")) if "  string " in path.read_text())
    victim.write_text(victim.read_text().replace("  string ", "  bytes ", 1))

    against = PROTO / "baseline.binpb"
    found = subprocess.run(
        [BUF, "breaking", tmp_path, "--against", against], capture_output=True, text=True, check=False
    )

    assert found.returncode != 0
    assert "changed type" in found.stdout


def test_the_stubs_ask_for_the_versions_that_they_were_made_for() -> None:
    made_with = re.search(r"^grpcio-tools==(\S+)", (tree.ROOT / "requirements/proto.txt").read_text(), re.MULTILINE)
    stub = next((tree.ROOT / "gen").rglob("*_pb2.py")).read_text()
    gencode = re.search(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", stub)
    assert made_with is not None
    assert gencode is not None
    major, minor, patch = map(int, gencode.groups())
    assert project("gen")["project"]["dependencies"] == [
        f"grpcio>={made_with[1]}",
        f"protobuf>={major}.{minor}.{patch},<{major + 2}",
    ]


def test_the_stubs_have_the_version_of_the_suite() -> None:
    version = project()["project"]["version"]
    assert project("gen")["project"]["version"] == version
    assert f"pawl-proto=={version}" in project()["project"]["dependencies"]


def test_linters_leave_generated_code_alone() -> None:
    assert "gen" in project()["tool"]["ruff"]["extend-exclude"]
