"""The contract, its stubs and its errors agree with the code."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import grpc

from pawl.error.v1 import error_pb2
from pawl.errors import Kind, by_reason
from tests import tables
from tests.tidy import tree

PROTO = tree.ROOT / "proto"


def project(folder: str = ".") -> dict[str, Any]:
    return tomllib.loads((tree.ROOT / folder / "pyproject.toml").read_text())


def test_proto_paths_match_packages_and_have_no_language_options() -> None:
    for path in PROTO.rglob("*.proto"):
        source = path.read_text()
        package = path.parent.relative_to(PROTO).as_posix().replace("/", ".")
        assert f"\npackage {package};\n" in source, path
        assert not re.search(r"^option \w+_(package|prefix|namespace)", source, re.MULTILINE), path


def test_stubs_require_the_versions_they_were_generated_for() -> None:
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


def test_stubs_have_the_same_version_as_the_suite() -> None:
    version = project()["project"]["version"]
    assert project("gen")["project"]["version"] == version
    assert f"pawl-proto=={version}" in project()["project"]["dependencies"]


PREFIX = "ERROR_REASON_"
# A comment above each value, which starts with the gRPC code.
VALUE = re.compile(r"// ([A-Z_]+)\. [^\n]*\n(?:  //[^\n]*\n)*  " + PREFIX + r"([A-Z_]+) = \d+;")


def test_every_contract_reason_has_an_error_class() -> None:
    reasons = {value.removeprefix(PREFIX) for value in error_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118 - not a mapping
    assert set(by_reason) == reasons


def test_contract_states_the_grpc_code_of_each_reason() -> None:
    source = (tree.ROOT / "proto/pawl/error/v1/error.proto").read_text()
    stated = {reason: code for code, reason in VALUE.findall(source)}
    assert stated == {reason: error.kind.value for reason, error in by_reason.items()}


def test_every_error_kind_is_a_grpc_code() -> None:
    assert {kind.value for kind in Kind} <= {code.name for code in grpc.StatusCode} - {"UNKNOWN", "OK"}


def test_every_method_documents_its_errors() -> None:
    assert [path for path, said in tables.errors().items() if not said] == []


def test_methods_with_request_id_or_page_token_document_the_errors() -> None:
    documented = tables.documented()
    for path, fields in tables.requests().items():
        assert "string request_id = " not in fields or "REQUEST_ID_REUSED" in documented[path], path
        assert "string page_token = " not in fields or "INVALID_PAGE_TOKEN" in documented[path], path


def test_documented_reasons_are_found() -> None:
    assert tables.common() >= {"UNAUTHENTICATED", "INVALID_FIELD", "INTERNAL"}
    assert "REQUEST_ID_REUSED" in tables.documented()["/pawl.agent.v1.AgentService/StartRun"]
    assert "SEQ_BEYOND_END" in tables.documented()["/pawl.agent.v1.AgentService/WatchSteps"], "as WatchRun"
