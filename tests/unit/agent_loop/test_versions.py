"""What a newer version has written is told from what is broken."""

from __future__ import annotations

import pytest

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import loop_state
from pawl.agent_loop.domain.loop_state import NewerVersion
from pawl.event.v1 import run_pb2


def test_a_run_with_a_state_of_a_newer_version_is_said_to_be_of_one() -> None:
    """I23."""
    message = run_pb2.Run.FromString(run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_RUNNING).SerializeToString())
    message.MergeFromString(b"\x28\x63")  # Field 5, the state: 99.
    with pytest.raises(NewerVersion, match="99"):
        wire.RUN.read(message)


def test_a_loop_state_of_a_newer_version_is_told_from_a_broken_one() -> None:
    with pytest.raises(NewerVersion):
        loop_state.read(b'{"failure":{"failure_class":"NEW","reason":"R","message":"m"}}')
    with pytest.raises(ValueError, match="cannot be read") as caught:
        loop_state.read(b"{")
    assert not isinstance(caught.value, NewerVersion)
