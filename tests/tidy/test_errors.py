"""services/pawl/errors.py and pawl.error.v1 say the same."""

from __future__ import annotations

import re

import grpc

from pawl.error.v1 import error_pb2
from pawl.errors import Kind, by_reason
from tests.tidy import tree

PREFIX = "ERROR_REASON_"
# A comment above each value, which begins with the gRPC code.
VALUE = re.compile(r"// ([A-Z_]+)\. [^\n]*\n(?:  //[^\n]*\n)*  " + PREFIX + r"([A-Z_]+) = \d+;")


def test_every_reason_of_the_contract_has_its_class() -> None:
    reasons = {value.removeprefix(PREFIX) for value in error_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118 - not a mapping
    assert set(by_reason) == reasons


def test_the_contract_states_the_grpc_code_of_each_reason() -> None:
    source = (tree.ROOT / "proto/pawl/error/v1/error.proto").read_text()
    stated = {reason: code for code, reason in VALUE.findall(source)}
    assert stated == {reason: error.kind.value for reason, error in by_reason.items()}


def test_every_kind_is_a_grpc_code() -> None:
    assert {kind.value for kind in Kind} <= {code.name for code in grpc.StatusCode} - {"UNKNOWN", "OK"}
