"""Validates agent definitions, selects their tools and derives options for their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import field
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.rules.limits import NONE_IS_ZERO, Limits
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX, TOOL_NAMES_MAX, AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.run import RunOptions, ToolChoice
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import DEFAULT_AGENT, DRAFT, check_agent_name, check_id
from pawl.chassis.labels import check_labels
from pawl.errors import InvalidField, ToolNotFound
from pawl.values import TOKENS_MAX, WaitKind

DEFAULT: Final = DEFAULT_AGENT
# The tool that delegates a task to another agent.
RUN_AGENT: Final = "run_agent"
# The tool that pursues a goal in the background.
START_GOAL: Final = "start_goal"
DELEGATES_MAX: Final = 64
ROLES_MAX: Final = 32
SOURCES_MAX: Final = 100
PATTERNS_MAX: Final = 100
TITLE_CHARACTERS_MAX: Final = 200
DESCRIPTION_CHARACTERS_MAX: Final = 2000
PROMPTS_MAX: Final = 10
PROMPT_CHARACTERS_MAX: Final = 1000
URL_CHARACTERS_MAX: Final = 2000


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Tools selected by name, source and name pattern. An empty selection means every tool that the user may call."""

    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return not (self.names or self.sources or self.patterns)


class AgentCard(msgspec.Struct, frozen=True, kw_only=True):
    title: str = ""
    description: str = ""
    example_prompts: tuple[str, ...] = ()
    avatar_url: str = ""


class AgentDefinition(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    options: AskedOptions = field(default_factory=AskedOptions)
    tools: ToolSelection = field(default_factory=ToolSelection)
    delegates_to: tuple[str, ...] = ()
    allowed_roles: tuple[str, ...] = ()
    card: AgentCard = field(default_factory=AgentCard)
    labels: Mapping[str, str] = field(default_factory=dict)
    # Tokens that all of the agent's runs may use per day; 0 means no limit.
    daily_tokens_max: int = 0


class TokenBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A daily or monthly token limit for an agent, user or store.

    `kind` is the wait reason of a run that is waiting for the next period.
    """

    kind: WaitKind
    tokens_max: int
    tokens_used: int
    end_time: float

    @property
    def is_used_up(self) -> bool:
        """True if no model call may start until the period ends."""
        return self.tokens_max <= self.tokens_used


class RateReached(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on model calls or tokens per minute has been reached. The next attempt may start at `end_time`."""

    end_time: float

    @property
    def kind(self) -> WaitKind:
        return WaitKind.RATE


class ModelTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a run's next model call. `models` is empty if all are allowed.

    `model_server` is empty for the default.
    """

    budgets: tuple[TokenBudget, ...] = ()
    models: tuple[str, ...] = ()
    model_server: str = ""
    # Whether the store has a limit of model calls or tokens per minute.
    is_rated: bool = False

    @property
    def exhausted(self) -> TokenBudget | None:
        """Return the used-up budget that renews last, or None if the model may be called."""
        used_up = (each for each in self.budgets if each.is_used_up)
        return max(used_up, key=lambda each: each.end_time, default=None)


class AgentVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A saved definition and the tools that it selected when it was saved. Immutable.

    Version 0 is the deployment's `default`.
    """

    definition: AgentDefinition
    version: int
    tool_names: tuple[str, ...] = ()
    create_time: float | None = None
    create_user_id: str = ""
    # A draft is visible only to `create_user_id`.
    draft: bool = False

    @property
    def run_name(self) -> str:
        return f"{DRAFT if self.draft else ''}{self.definition.name}"

    def may_be_used_with(self, roles: Iterable[str]) -> bool:
        allowed = self.definition.allowed_roles
        return not allowed or not set(allowed).isdisjoint(roles)

    def may_be_seen_with(self, roles: Iterable[str]) -> bool:
        """Return whether a user with these roles may see the agent: those who may use it, and all admins."""
        held = set(roles)
        return Role.ADMIN in held or self.may_be_used_with(held)


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    arguments_schema_json: bytes = b""


class Selected(NamedTuple):
    names: tuple[str, ...]
    unmatched: tuple[str, ...]


def check(definition: AgentDefinition, defaults: RunDefaults) -> AgentDefinition:
    """Validate the definition. Return it without duplicate entries.

    Raises:
        InvalidField, InvalidId, TooLarge: The error names the field.
    """
    check_id(definition.name, "definition.name")
    if definition.options.tool_names:
        raise InvalidField("options.tool_names: set the agent's `tools` instead", field="definition.options")
    if definition.options.without_tools and not definition.tools.is_open:
        raise InvalidField("tools: leave it empty, because options.without_tools is set", field="definition.tools")
    complete(definition.options, defaults)
    _check_selection(definition.tools)
    _check_card(definition.card)
    check_labels(definition.labels, "definition.labels")
    if definition.daily_tokens_max > TOKENS_MAX:
        raise InvalidField(
            f"daily_tokens_max must be at most {TOKENS_MAX}, got {definition.daily_tokens_max}",
            field="definition.daily_tokens_max",
        )
    _check_count(definition.delegates_to, "delegates_to", DELEGATES_MAX)
    for name in definition.delegates_to:
        check_id(name, "definition.delegates_to")
    if definition.delegates_to and definition.options.without_tools:
        raise InvalidField(
            "delegates_to: leave it empty, because an agent without tools cannot delegate",
            field="definition.delegates_to",
        )
    _check_count(definition.allowed_roles, "allowed_roles", ROLES_MAX)
    for role in definition.allowed_roles:
        check_id(role, "definition.allowed_roles")
    if definition.name == DEFAULT and definition.allowed_roles:
        message = f"allowed_roles: leave it empty; every user may use the agent {DEFAULT}"
        raise InvalidField(message, field="definition.allowed_roles")
    return replace(
        definition,
        delegates_to=tuple(dict.fromkeys(definition.delegates_to)),
        allowed_roles=tuple(dict.fromkeys(definition.allowed_roles)),
    )


def check_draft(definition: AgentDefinition, defaults: RunDefaults) -> AgentDefinition:
    """Validate a draft like `check`. Drafts must not have allowed roles or a token quota.

    Raises:
        InvalidField, InvalidId, TooLarge: The error names the field.
    """
    if definition.allowed_roles:
        message = "allowed_roles: leave it empty; a draft is private. Set it when you publish the agent"
        raise InvalidField(message, field="definition.allowed_roles")
    if definition.daily_tokens_max:
        message = "daily_tokens_max: leave it empty; a draft has no quota. Set it when you publish the agent"
        raise InvalidField(message, field="definition.daily_tokens_max")
    return check(definition, defaults)


def draft_name(name: str) -> str:
    """Return the draft's name without its prefix, or an empty string if `name` is not a draft.

    Raises:
        InvalidId: `name` is neither a draft name nor an agent name.
    """
    own = check_agent_name(name, "agent", optional=True).removeprefix(DRAFT)
    return own if own != name else ""


def select(definition: AgentDefinition, offered: Sequence[OfferedTool]) -> Selected:
    """Return the names of the selected tools, and the sources and patterns that match no tool.

    An open selection returns no names. Otherwise, the names include `run_agent` if the agent delegates.

    Raises:
        ToolNotFound: A selected tool is not available.
        InvalidField: Too many tools are selected, or `tool_choice` is not among them.
    """
    selection, known = definition.tools, {tool.name for tool in offered}
    if selection.is_open:
        return Selected((), ())
    wanted = dict.fromkeys((*selection.names, *((RUN_AGENT,) if definition.delegates_to else ())))
    for name in wanted:
        if name not in known:
            raise ToolNotFound(f"tools.names: there is no tool {name!r} that you may call", tool_name=name)
    found, unmatched = set(wanted), list[str]()
    for source in dict.fromkeys(selection.sources):
        names = {tool.name for tool in offered if tool.source == source}
        unmatched += [] if names else [source]
        found |= names
    for pattern in dict.fromkeys(selection.patterns):
        names = {name for name in known if matches(pattern, name)}
        unmatched += [] if names else [pattern]
        found |= names
    if len(found) > TOOL_NAMES_MAX:
        raise InvalidField(
            f"tools must select at most {TOOL_NAMES_MAX} tools, got {len(found)}", field="definition.tools"
        )
    chosen = definition.options.tool_choice.tool_name
    if chosen and chosen not in found:
        raise InvalidField("options.tool_choice names a tool that `tools` does not select", field="definition.options")
    return Selected(tuple(sorted(found)), tuple(unmatched))


def matches(pattern: str, name: str) -> bool:
    """Return whether `name` matches `pattern`. A `*` matches any characters.

    In the worst case, the cost is proportional to the product of both lengths.
    """
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))


def deployed(defaults: RunDefaults) -> AgentVersion:
    options = AskedOptions(
        model=defaults.model,
        instructions=defaults.instructions,
        limits=msgspec.structs.asdict(defaults.limits),
        approvals_required=defaults.approvals_required,
        without_background=defaults.without_background,
    )
    card = AgentCard(title="Deployment default")
    return AgentVersion(definition=AgentDefinition(name=DEFAULT, options=options, card=card), version=0)


def options_of(agent: AgentVersion, requested: AskedOptions, ceilings: Limits) -> AskedOptions:
    """Merge the agent's options with those requested for a run. The result is the input of `options.complete`.

    A run may override every option of `default`. It may only narrow the options of any other agent.

    Raises:
        InvalidField: The run overrides or exceeds one of the agent's options.
    """
    preset = _agent_options(agent, ceilings)
    if agent.definition.name != DEFAULT:
        _check_narrower(agent.definition.name, preset, requested)
    given = {name: value for name, value in _set_options(requested).items() if name not in {"limits", "without_tools"}}
    if requested.model and requested.model != preset.model:
        given["model_fallbacks"] = requested.model_fallbacks
    merged: dict[str, Any] = msgspec.structs.asdict(preset) | given
    merged["limits"] = dict(preset.limits) | dict(requested.limits)
    merged["approvals_required"] = max(preset.approvals_required, requested.approvals_required)
    # A run of `default` may specify its own tool names.
    merged["without_tools"] = requested.without_tools or (preset.without_tools and not requested.tool_names)
    if merged["without_tools"]:
        merged |= {"tool_names": (), "tool_choice": requested.tool_choice}
    return AskedOptions(**merged)


def delegated(agent: AgentVersion, own: RunOptions) -> RunOptions:
    """Return the options for a run delegated to this agent.

    `own` holds the delegating run's options. They replace unset options and cap the limits. If the returned
    `tool_names` is empty and `without_tools` is not set, the run has the delegating run's tools.
    """
    preset = _agent_options(agent, own.limits)
    given = {name: value for name, value in _set_options(preset).items() if name not in {"limits", "tool_names"}}
    limits = {name: type(getattr(own.limits, name))(value) for name, value in preset.limits.items()}
    if preset.model:
        given["model_fallbacks"] = preset.model_fallbacks
    return replace(
        own,
        **given
        | {
            "tool_names": preset.tool_names,
            "without_tools": preset.without_tools,
            "tool_choice": preset.tool_choice,
            "limits": replace(own.limits, **limits),
            "approvals_required": max(own.approvals_required, preset.approvals_required),
            "response_format": preset.response_format,
        },
    )


def _agent_options(agent: AgentVersion, ceilings: Limits) -> AskedOptions:
    options, names = agent.definition.options, agent.tool_names
    limits = {name: _within(name, value, ceilings) for name, value in options.limits.items()}
    # An empty list of names would mean all tools.
    is_empty = not agent.definition.tools.is_open and not names
    without_tools = options.without_tools or is_empty
    choice = ToolChoice() if is_empty else options.tool_choice
    return replace(options, limits=limits, tool_names=names, without_tools=without_tools, tool_choice=choice)


def _within(name: str, value: float, ceilings: Limits) -> float:
    ceiling: float = getattr(ceilings, name)
    if name in NONE_IS_ZERO and 0 in {value, ceiling}:
        return value or ceiling
    return min(value, ceiling)


def _set_options(options: AskedOptions) -> Mapping[str, Any]:
    silent = AskedOptions()
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value != getattr(silent, name)}


def _check_narrower(name: str, preset: AskedOptions, requested: AskedOptions) -> None:
    fixed = set(_set_options(preset)) - {"limits", "tool_names", "without_tools", "tool_choice", "approvals_required"}
    if "model" in fixed:
        # A fixed model also fixes its fallbacks.
        fixed.add("model_fallbacks")
    for option, value in _set_options(requested).items():
        if option in fixed and value != getattr(preset, option):
            message = f"options.{option}: the agent {name} sets it. Leave it out, or start the run without the agent"
            raise InvalidField(message, field=f"options.{option}")
    has_tools = bool(preset.tool_names) or preset.without_tools
    wanted = (*requested.tool_names, *((requested.tool_choice.tool_name,) if requested.tool_choice.tool_name else ()))
    if beyond := [tool for tool in wanted if has_tools and tool not in preset.tool_names]:
        message = f"options.tool_names: the agent {name} does not have the tool {beyond[0]:.100}"
        raise InvalidField(message, field="options.tool_names")
    for limit, most in preset.limits.items():
        own = requested.limits.get(limit)
        is_open = limit in NONE_IS_ZERO and most == 0
        is_more = own is not None and (own > most or (own == 0 and limit in NONE_IS_ZERO))
        if is_more and not is_open:
            message = f"limits.{limit} must be at most {most:g} with the agent {name}"
            raise InvalidField(message, field=f"options.limits.{limit}")


def _check_selection(selection: ToolSelection) -> None:
    for name, most in (("names", TOOL_NAMES_MAX), ("sources", SOURCES_MAX), ("patterns", PATTERNS_MAX)):
        values: tuple[str, ...] = getattr(selection, name)
        _check_count(values, f"tools.{name}", most)
        for value in values:
            if not value or len(value) > NAME_CHARACTERS_MAX or not value.isprintable():
                message = f"each entry of tools.{name} must have 1 to {NAME_CHARACTERS_MAX} printable characters"
                raise InvalidField(message, field=f"definition.tools.{name}")


def _check_card(card: AgentCard) -> None:
    _check_count(card.example_prompts, "card.example_prompts", PROMPTS_MAX)
    texts = (
        ("title", card.title, TITLE_CHARACTERS_MAX),
        ("description", card.description, DESCRIPTION_CHARACTERS_MAX),
        *(("example_prompts", prompt, PROMPT_CHARACTERS_MAX) for prompt in card.example_prompts),
    )
    for name, value, most in texts:
        path = f"definition.card.{name}"
        if len(value) > most:
            raise InvalidField(f"card.{name} must be at most {most} characters", field=path)
        checks.text(value, path, bytes_max=4 * most, may_be_empty=True)
    if card.avatar_url and not _is_web_address(card.avatar_url):
        message = f"card.avatar_url must be an https URL of at most {URL_CHARACTERS_MAX} characters, without a password"
        raise InvalidField(message, field="definition.card.avatar_url")


def _is_web_address(url: str) -> bool:
    if len(url) > URL_CHARACTERS_MAX or not url.isascii() or not url.isprintable() or set(url) & set(' "<>\\^`{|}'):
        return False
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        return False
    return parts.scheme == "https" and bool(parts.hostname) and "@" not in parts.netloc and has_port


def _check_count(values: Sequence[str], name: str, most: int) -> None:
    if len(values) > most:
        raise InvalidField(f"{name} must have at most {most} entries", field=f"definition.{name}")
