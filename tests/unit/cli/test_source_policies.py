"""The words of `pawl sources add-mcp --policy`: each says one field of a policy."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.cli.failure import CommandError
from pawl.cli.source_policies import policy_of
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1.source_pb2 import SourceToolPolicy


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("Safe, READ_ONLY", {"category": call_pb2.TOOL_CATEGORY_SAFE, "effect_class": call_pb2.EFFECT_CLASS_READ_ONLY}),
        ("excluded", {"excluded": True}),
        ("bulk=$.body.Orders[*].lines", {"bulk_count": "$.body.Orders[*].lines"}),
        ("without_background", {"without_background": True}),
        ("permits_grants", {"permits_grants": True}),
        ("timeout_seconds=0.5,async_timeout_seconds=7200", {"timeout_seconds": 0.5, "async_timeout_seconds": 7200}),
        ("reports=end", {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_END)}),
        ("reports=None", {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_NONE)}),
        (
            "reports=every=10",
            {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_EVERY, report_iterations=10)},
        ),
        (
            "reports=digest=600",
            {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_DIGEST, report_seconds=600)},
        ),
    ],
)
def test_each_word_is_a_field_of_the_policy(words: str, fields: dict[str, Any]) -> None:
    assert policy_of(f"look={words}") == SourceToolPolicy(tool_name="look", **fields)


def test_every_field_of_a_policy_has_a_word() -> None:
    words = "safe,idempotent,excluded,without_background,permits_grants,bulk=$.a,timeout_seconds=1"
    policy = policy_of(f"*={words},async_timeout_seconds=2,reports=change")
    assert {field.name for field, _ in policy.ListFields()} == set(SourceToolPolicy.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("look", "of the form TOOL=WORD,WORD"),
        ("=safe", "of the form TOOL=WORD,WORD"),
        ("look=nice", "'nice' is none of safe, sensitive, "),
        ("look=timeout_seconds", "'timeout_seconds' is none of"),
        ("look=excluded=yes", "'excluded=yes' is none of"),
        ("look=timeout_seconds=soon", "it must be a number of seconds"),
        ("look=reports=now", "reports is every, every=10"),
        ("look=reports=every=ten", "reports is every, every=10"),
        ("look=reports=", 'reports is "every", "change"'),
    ],
)
def test_what_is_no_policy_is_said_in_a_sentence(given: str, told: str) -> None:
    with pytest.raises(CommandError, match=r"^[^\n]*$") as refused:
        policy_of(given)
    assert told in str(refused.value)
