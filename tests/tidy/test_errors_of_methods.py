"""The comments of methods say how each can fail; tests/rpc compares them with what is answered."""

from __future__ import annotations

from tests import contract


def test_every_method_names_its_errors_or_says_that_it_has_none() -> None:
    assert [path for path, said in contract.errors().items() if not said] == []


def test_methods_with_a_request_id_or_pages_name_what_comes_of_a_wrong_one() -> None:
    documented = contract.documented()
    for path, fields in contract.requests().items():
        assert "string request_id = " not in fields or "REQUEST_ID_REUSED" in documented[path], path
        assert "string page_token = " not in fields or "INVALID_PAGE_TOKEN" in documented[path], path


def test_only_reasons_that_there_are_are_named() -> None:
    assert contract.common() >= {"UNAUTHENTICATED", "INVALID_FIELD", "INTERNAL"}
    assert "REQUEST_ID_REUSED" in contract.documented()["/pawl.agent.v1.AgentService/StartRun"]
    assert "SEQ_BEYOND_END" in contract.documented()["/pawl.agent.v1.AgentService/WatchSteps"], "as WatchRun"
