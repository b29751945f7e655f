"""The script: what the server shall say instead of following its rules, and how often.

Steps are tried from the top; the first that matches and is not used up gives the reply. A request that no step takes
goes to the rules, or is refused when the script says `"otherwise": "error"`: then a test sees what it did not foresee.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pawl.model_server.reply import Positive, Reply

if TYPE_CHECKING:
    from pawl.model_server.request import ChatRequest

REQUESTS_COUNTED_MAX = 10_000
"""The number of different requests remembered to count repetitions; the oldest are forgotten first."""


class ScriptError(ValueError):
    """The script cannot be used. The text says what is wrong and where."""


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The requests that a step is for. Everything that is given must hold.

    `user_contains` looks for a piece of text in the last user message, ignoring case; `user_matches` is a regular
    expression searched in it. `round` counts the assistant messages after it: 0 is the first model call for this
    prompt, 1 the call with the first results. `tools` tells calls with tools from calls without. `model` is the name of
    the model that is asked. `images` tells calls that show an image, in whichever message, from those that show none.
    """

    user_contains: str | None = None
    user_matches: str | None = None
    round: int | None = None
    tools: bool | None = None
    model: str | None = None
    images: bool | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reply and when to give it.

    `times` limits how often; `per` says what is counted: `"script"` counts every use, `"request"` counts each distinct
    list of messages by itself, so that `times: 2` makes each request fail twice and its third attempt go on to the next
    step, however many conversations run at once. Without `when` the defaults are one use in all; with it, any number.
    """

    reply: Reply
    when: When | None = None
    times: Positive | None = None
    per: Literal["script", "request"] = "request"


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole script file."""

    steps: tuple[Step, ...] = ()
    otherwise: Literal["rules", "error"] = "rules"


def parse_script(text: bytes | str) -> Script:
    """Reads a script from JSON. Raises ScriptError with the place of the first mistake."""
    try:
        script = msgspec.json.decode(text, type=Script)
    except msgspec.MsgspecError as error:
        raise ScriptError(f"The script is not valid: {error}") from error
    for number, step in enumerate(script.steps):
        pattern = step.when.user_matches if step.when else None
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ScriptError(
                f"Not a regular expression: {error} - at `$.steps[{number}].when.user_matches`"
            ) from error
    return script


def load_script(path: Path) -> Script:
    """Reads a script file. Raises ScriptError, also when the file cannot be read."""
    try:
        return parse_script(path.read_bytes())
    except OSError as error:
        raise ScriptError(f"The script {path} cannot be read: {error.strerror}.") from error
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from error


class Player:
    """Plays one script: chooses the step for a request and counts its uses."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._uses: OrderedDict[tuple[int, str], int] = OrderedDict()

    def choose(self, request: ChatRequest) -> Reply | None:
        """Returns the reply of the first step that takes this request and counts the use; None if there is none."""
        for number, step in enumerate(self.script.steps):
            if matches(step.when, request) and self._use(number, step, request):
                return step.reply
        return None

    def _use(self, number: int, step: Step, request: ChatRequest) -> bool:
        once_in_all = step.when is None and step.times is None
        limit = 1 if once_in_all else step.times
        if limit is None:
            return True
        counted = "" if once_in_all or step.per == "script" else fingerprint(request)
        used = self._uses.get((number, counted), 0)
        if used >= limit:
            return False
        self._uses[number, counted] = used + 1
        if len(self._uses) > REQUESTS_COUNTED_MAX:
            self._uses.popitem(last=False)
        return True


def matches(when: When | None, request: ChatRequest) -> bool:
    """Return whether a step with this condition is meant for this request."""
    if when is None:
        return True
    prompt = request.prompt
    return (
        (when.user_contains is None or when.user_contains.lower() in prompt.lower())
        and (when.user_matches is None or re.search(when.user_matches, prompt) is not None)
        and (when.round is None or when.round == request.round)
        and (when.tools is None or when.tools == bool(request.tools))
        and (when.model is None or when.model == request.model)
        and (when.images is None or when.images == request.has_images)
    )


def fingerprint(request: ChatRequest) -> str:
    """A digest of the messages: equal for the retries of one model call, different for everything else."""
    return hashlib.sha256(msgspec.json.encode(request.messages)).hexdigest()
