"""A checker of edited arguments and answers."""

from __future__ import annotations

from pawl.agent_loop.app.public_values import CallView, EditVerdict, RunView
from pawl.errors import InvalidArguments


class FakeChecker:
    """A `CallChecker` that refuses arguments, and answers, with the word `bad` in them."""

    async def check_answer(self, store_id: str, answer_schema_json: bytes, answer: str) -> None:
        if "bad" in answer:
            raise InvalidArguments("the answer does not fit: it must be a number")

    async def check_edit(self, store_id: str, run: RunView, call: CallView, arguments_json: bytes) -> EditVerdict:
        if b"bad" in arguments_json:
            raise InvalidArguments("to: not an address; subject: missing")
        return EditVerdict(arguments_json=arguments_json.replace(b" ", b""), digest="ef" * 32)
