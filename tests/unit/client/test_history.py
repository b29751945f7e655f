"""A history from elsewhere that is given in the wrong shape."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.client.history import history
from pawl.errors import InvalidHistory


@pytest.mark.parametrize("given", [{"messages": [{"role": "user", "content": "Ahoy"}]}, "[]", b"[]"])
def test_what_is_no_list_of_messages_is_said_to_be_none(given: Any) -> None:
    with pytest.raises(InvalidHistory, match="give the list of messages alone"):
        history(given)
