"""Questions that a running tool asks its user, and their answers, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from pawl.tools.rules.definition import given
from pawl.tools.sdk.context import QuestionDeclined, ToolError
from pawl.values import Answer, Question

QUESTIONS_MAX: Final = 20


class Dialogue:
    """A queue with at most one open question.

    The future `asked` is done while a question is open, and `answered` is done otherwise.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        loop = asyncio.get_running_loop()
        self.question: Question | None = None
        self.asked: asyncio.Future[None] = loop.create_future()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.answered.set_result(None)
        self._answers = list(answers)
        self.position = 0  # The number of answers that the tool has taken.
        self._turn = asyncio.Lock()

    async def ask(self, question: Question) -> str:
        """Wait for the answer to a question.

        Raises:
            QuestionDeclined: The user did not answer.
            ToolError: The tool has asked too many questions.
        """
        async with self._turn:
            while (found := given(self._answers, self.position, question)) is None:
                if len(self._answers) >= QUESTIONS_MAX:  # Includes questions of earlier attempts.
                    raise ToolError(f"a tool may ask at most {QUESTIONS_MAX} questions per call")
                self.question = question
                self._turn_to(self.asked)
                await asyncio.wait({self.answered})
            answer = self._answers[found]
            self.position = found + 1
        if answer.declined:
            raise QuestionDeclined(f"the user did not answer: {question.question}")
        return answer.answer

    def give(self, answers: Sequence[Answer]) -> None:
        """Accept all answers given so far. Answers that were already accepted do not change."""
        self._answers += answers[len(self._answers) :]
        if self.question is not None and given(self._answers, self.position, self.question) is not None:
            self.question = None
            self._turn_to(self.answered)

    def _turn_to(self, now: asyncio.Future[None]) -> None:
        if now.done():
            return
        now.set_result(None)
        fresh = asyncio.get_running_loop().create_future()
        if now is self.asked:
            self.answered = fresh
        else:
            self.asked = fresh
