"""The methods that are reached through the gateway."""

from __future__ import annotations

import pytest

from pawl.chassis.roles import CALLERS
from pawl.errors import InvalidField, MethodNotFound
from pawl.gateway.adapters.services import PUBLIC, WATCH_RUN, find, write

GIVES_RUN = "pawl.agent.v1.AgentService/GetRun"
NOT_FOR_PEOPLE = {"ExecutionService", "WorkerService", "MailboxService", "LedgerService", "BatchService", "KeyService"}


def test_what_people_may_call_is_there_and_nothing_else() -> None:
    people = {"viewer", "member", "approver", "admin", "operator"}
    streams_in = {"pawl.agent.v1.AgentService/Session", "pawl.tool.v1.DocumentService/PutDocument"}
    packages = ("/pawl.agent.v1.", "/pawl.tool.v1.", "/pawl.notify.v1.")
    meant = {
        name[1:]
        for name, callers in CALLERS.items()
        if name.startswith(packages) and people & set(callers) and "/AttachWorker" not in name
    }
    assert set(PUBLIC) == {name for name in meant if name in PUBLIC or name not in streams_in}
    assert not any(service in name for name in PUBLIC for service in NOT_FOR_PEOPLE)
    assert "pawl.agent.v1.TriggerService/DeliverWebhook" not in PUBLIC


def test_what_is_not_there_is_said_so() -> None:
    for name in ("", "a/b", "pawl.tool.v1.ExecutionService/CheckCalls", "pawl.job.v1.LedgerService/GetRun"):
        with pytest.raises(MethodNotFound, match="no such method"):
            find(name, streams=False)
    with pytest.raises(MethodNotFound, match="POST /stream"):
        find(WATCH_RUN, streams=False)
    with pytest.raises(MethodNotFound, match="POST /rpc/"):
        find(GIVES_RUN, streams=True)


@pytest.mark.parametrize("said", [[], "x", None, {"runIdd": "x"}, {"runId": 3}, {"waitSeconds": "soon"}])
def test_what_is_no_request_is_refused(said: object) -> None:
    with pytest.raises(InvalidField):
        find(GIVES_RUN, streams=False).read(said)


def test_deep_json_is_refused() -> None:
    deep: object = {}
    for _ in range(5000):
        deep = {"run": deep}
    with pytest.raises(InvalidField):
        find(GIVES_RUN, streams=False).read(deep)


def test_a_message_is_the_json_of_protobuf() -> None:
    request = find(WATCH_RUN, streams=True).read({"runId": "run_1", "afterSeq": "12"})
    assert write(request) == {"runId": "run_1", "afterSeq": "12"}
