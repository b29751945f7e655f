"""The calls that a model is writing, as an activity of AG-UI: for display only, none is a call until all is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

ACTIVITY: Final = "pawl.draft"


class Drafts:
    """The calls of one round while they are written. Each piece of their arguments is sent once."""

    def __init__(self) -> None:
        self._message_id = ""
        self._calls: list[tuple[str, list[str]]] = []

    def write(self, message_id: str, fragments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what shows more of the calls, under the id of a message that is theirs alone."""
        is_new, patch = not self._calls, list[dict[str, Any]]()
        self._message_id = message_id
        for each in fragments:
            place, added = each.get("index", 0), each.get("argumentsText", "")
            while len(self._calls) <= place:
                self._calls.append(("", []))
                patch.append({"op": "add", "path": "/calls/-", "value": {"toolName": "", "arguments": []}})
            name, pieces = self._calls[place]
            if each.get("toolName"):
                name += each["toolName"]
                self._calls[place] = (name, pieces)
                patch.append({"op": "replace", "path": f"/calls/{place}/toolName", "value": name})
            if added:
                pieces.append(added)
                patch.append({"op": "add", "path": f"/calls/{place}/arguments/-", "value": added})
        if is_new:
            return self.shown()
        return [self._event("ACTIVITY_DELTA", patch=patch)] if patch else []

    def shown(self) -> list[dict[str, Any]]:
        """Return what shows the calls so far to somebody who comes now."""
        calls = [{"toolName": name, "arguments": ["".join(pieces)] if pieces else []} for name, pieces in self._calls]
        return [self._event("ACTIVITY_SNAPSHOT", content={"calls": calls})] if calls else []

    def end(self) -> list[dict[str, Any]]:
        """Return what takes them away: the calls are there now, or the attempt is void."""
        if not self._calls:
            return []
        self._calls = []
        return [self._event("ACTIVITY_SNAPSHOT", content={"calls": []})]

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "messageId": self._message_id, "activityType": ACTIVITY, **more}
