"""`--policy` of `pawl sources`: what an admin says of the tools of a source, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pawl.chassis import job_reports
from pawl.cli.failure import CommandError
from pawl.cli.jobs import reports_of
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1 import source_pb2

_CATEGORIES: Final = ("safe", "sensitive", "destructive")
_EFFECTS: Final = ("read_only", "idempotent", "at_most_once")
_FLAGS: Final = ("excluded", "without_background", "permits_grants")
HELP: Final = (
    f"TOOL=WORDS: {', '.join((*_CATEGORIES, *_EFFECTS, *_FLAGS))}, bulk=$.body.items, timeout_seconds=30,"
    " async_timeout_seconds=7200 or reports=end (as of pawl jobs start), with commas between; TOOL may be *."
    " Repeatable."
)


def policy_of(given: str) -> source_pb2.SourceToolPolicy:
    """Return the policy in `TOOL=WORD,WORD`.

    Raises:
        CommandError: there is none in it.
    """
    name, _, words = given.partition("=")
    policy = source_pb2.SourceToolPolicy(tool_name=name)
    for word in filter(None, map(str.strip, words.split(","))):
        _add(policy, word, given)
    if not name or policy == source_pb2.SourceToolPolicy(tool_name=name):
        raise CommandError(f"--policy {given!r} must be of the form TOOL=WORD,WORD.")
    return policy


def _add(policy: source_pb2.SourceToolPolicy, given_word: str, given: str) -> None:
    word, sign, value = given_word.partition("=")
    word = word.lower()
    if sign and word in _WITH_VALUE:
        try:
            _WITH_VALUE[word](policy, value)
        except (ValueError, InvalidField) as error:
            said = error.message if isinstance(error, InvalidField) else "it must be a number of seconds"
            raise CommandError(f"--policy {given!r}: {given_word!r}: {said}.") from None
    elif not sign and word in _CATEGORIES:
        policy.category = call_pb2.ToolCategory.Value(f"TOOL_CATEGORY_{word.upper()}")
    elif not sign and word in _EFFECTS:
        policy.effect_class = call_pb2.EffectClass.Value(f"EFFECT_CLASS_{word.upper()}")
    elif not sign and word in _FLAGS:
        setattr(policy, word, True)
    else:
        known = ", ".join((*_CATEGORIES, *_EFFECTS, *_FLAGS, *(f"{each}=..." for each in _WITH_VALUE)))
        raise CommandError(f"--policy {given!r}: {given_word!r} is none of {known}.")


def _bulk(policy: source_pb2.SourceToolPolicy, path: str) -> None:
    policy.bulk_count = path


def _timeout(policy: source_pb2.SourceToolPolicy, seconds: str) -> None:
    policy.timeout_seconds = float(seconds)


def _async_timeout(policy: source_pb2.SourceToolPolicy, seconds: str) -> None:
    policy.async_timeout_seconds = float(seconds)


def _reports(policy: source_pb2.SourceToolPolicy, said: str) -> None:
    fields = job_reports.read(reports_of(said, "reports"))
    reports = run_pb2.JobReports.Value(f"JOB_REPORTS_{fields.pop('reports')}")
    policy.reports.CopyFrom(run_pb2.ReportPolicy(reports=reports, **fields))


_WITH_VALUE: Final[dict[str, Callable[[source_pb2.SourceToolPolicy, str], None]]] = {
    "bulk": _bulk,
    "timeout_seconds": _timeout,
    "async_timeout_seconds": _async_timeout,
    "reports": _reports,
}
