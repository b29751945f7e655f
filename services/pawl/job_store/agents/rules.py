"""Rules for saving drafts of agents. The rules for versions are in `job_store.versions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, TypeAlias

from msgspec.structs import replace

from pawl.errors import AgentCycle, AgentNotFound, TooLarge
from pawl.job_store.versions.rules import DefinitionRow, Kind, VersionRow, check_uses

AGENT: Final = Kind("agent", "delegates_to", AgentNotFound, AgentCycle)
# Maximum number of drafts per user.
DRAFTS_MAX: Final = 20

# Returns a user's draft from the store's agents by name, the user's drafts by name, and the time.
SaveDraft: TypeAlias = Callable[[Mapping[str, DefinitionRow], Mapping[str, VersionRow], datetime], VersionRow]


def drafted(
    requested: VersionRow,
    delegates_to: tuple[str, ...],
    agents: Mapping[str, DefinitionRow],
    drafts: Mapping[str, VersionRow],
) -> VersionRow:
    """Return the draft that results from saving `requested`. If nothing has changed, return the existing draft.

    `agents` contains all the store's agents by name, and `drafts` all the user's drafts. The delegations of a draft
    must be valid for an agent with its name.

    Raises:
        AgentNotFound, AgentCycle: See `versions.rules.saved`.
        TooLarge: The user has too many drafts.
    """
    check_uses(AGENT, requested.name, delegates_to, agents)
    own = drafts.get(requested.name)
    if own is not None and own.content == requested.content:
        return own
    if own is None and len(drafts) >= DRAFTS_MAX:
        raise TooLarge(f"a user can have at most {DRAFTS_MAX} drafts: delete one first")
    return replace(requested, version=own.version + 1 if own is not None else 1)
