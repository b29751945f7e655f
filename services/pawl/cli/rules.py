"""`pawl rules`: what people have decided for the next time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command, narrows, new_request_id, seconds_of
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.identity.v1 import key_pb2
from pawl.tool.v1 import rule_pb2

app = typer.Typer(help="Rules that allow, ask about or deny calls without asking you again.", no_args_is_help=True)


Tool = Annotated[
    str, typer.Argument(help="Name of a tool, `name.*` for all of a source, `*` for all.", show_default=False)
]
Run = Annotated[str | None, typer.Option("--run", help="Only in this run.", callback=narrows)]
Conversation = Annotated[
    str | None, typer.Option("--conversation", help="Only in this conversation.", callback=narrows)
]
Agent = Annotated[
    str | None,
    typer.Option("--agent", help="For all runs of this agent of the store; needs the role admin.", callback=narrows),
]
Everybody = Annotated[bool, typer.Option("--everybody", help="For all users of the store; needs the role admin.")]
Like = Annotated[
    list[str] | None, typer.Option("--like", help="argument=text with * and ?, as in to=*@example.com. Repeatable.")
]
Equals = Annotated[list[str] | None, typer.Option("--equals", help="argument=JSON, as in amount=5. Repeatable.")]
For = Annotated[str | None, typer.Option("--for", help="How long: 30m, 2h, 7d.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for whoever reads the list.")]


@app.command()
@command(asks="tools")
async def allow(
    target: AsyncClient,
    console: Console,
    tool: Tool,
    *,
    run: Run = None,
    conversation: Conversation = None,
    agent: Agent = None,
    everybody: Everybody = False,
    like: Like = None,
    equals: Equals = None,
    lasts: For = None,
    uses: Annotated[int, typer.Option(min=0, help="How many calls it may allow; 0 for any number.")] = 0,
    items: Annotated[int, typer.Option(min=0, help="Most items of a bulk call; without it bulk calls are asked.")] = 0,
    destructive: Annotated[bool, typer.Option("--destructive", help="With *: destructive tools too.")] = False,
    reason: Reason = "",
) -> None:
    """Let calls run without an approval. `pawl rules allow '*' --for 1h` is trust for an hour."""
    rule = _rule(rule_pb2.RULE_EFFECT_ALLOW, tool, _where_of(run, conversation, agent, everybody=everybody), reason)
    rule.uses_max, rule.items_max, rule.includes_destructive = uses, items, destructive
    await _make(target, console, rule, like=like, equals=equals, lasts=lasts)


def _stricter(effect: rule_pb2.RuleEffect.ValueType, what: str) -> Callable[..., None]:
    """Return a command that makes a rule which lets nothing pass that would not pass without it."""

    async def work(
        target: AsyncClient,
        console: Console,
        tool: Tool,
        *,
        run: Run = None,
        conversation: Conversation = None,
        agent: Agent = None,
        everybody: Everybody = False,
        like: Like = None,
        equals: Equals = None,
        lasts: For = None,
        reason: Reason = "",
    ) -> None:
        rule = _rule(effect, tool, _where_of(run, conversation, agent, everybody=everybody), reason)
        await _make(target, console, rule, like=like, equals=equals, lasts=lasts)

    work.__doc__ = what
    return command(asks="tools")(work)


app.command("ask")(_stricter(rule_pb2.RULE_EFFECT_ASK, "Have calls approved, whatever the category of the tool."))
app.command("deny")(_stricter(rule_pb2.RULE_EFFECT_DENY, "Refuse calls without asking anybody."))


@app.command()
@command(asks="tools")
async def revoke(
    target: AsyncClient,
    console: Console,
    rule_id: Annotated[str, typer.Argument(help="Id of the rule.", show_default=False)],
) -> None:
    """End a rule for good."""
    await end(target, rule_id)
    console.print(f"Revoked {rule_id}: nothing that has not begun runs in its name.", style="green", markup=False)


@app.command("list")
@command(asks="tools")
async def list_rules(
    target: AsyncClient,
    console: Console,
    *,
    ended: Annotated[bool, typer.Option("--all", help="Also those that are revoked, expired or used up.")] = False,
    all_users: Annotated[bool, typer.Option("--all-users", help="Of all users; needs the role admin.")] = False,
) -> None:
    """List your rules and those of the store, the newest first."""
    request = rule_pb2.ListRulesRequest(include_ended=ended, all_users=all_users)
    found = [rule async for page in target.pages(target.rules.ListRules, request) for rule in page.rules]
    if not found:
        console.print("There are no rules: the category of each tool decides.")
        return
    show_table(console, ("rule", "says", "tool", "where", "calls", "until", "by"), list(map(_row, found)))


async def create(target: AsyncClient, rule: rule_pb2.Rule) -> rule_pb2.Rule:
    """Make a rule; returns it as made.

    Raises:
        PawlError: it was not made.
    """
    request = rule_pb2.CreateRuleRequest(request_id=new_request_id(), rule=rule)
    return (await target.rules.CreateRule(request)).rule


async def end(target: AsyncClient, rule_id: str) -> None:
    """Revoke a rule for good. Idempotent.

    Raises:
        PawlError: it was not revoked.
    """
    await target.rules.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))


def set_end(thing: rule_pb2.Rule | key_pb2.Key, lasts: str) -> None:
    """Have a rule or a key end by itself after a time like 30m, 2h or 7d.

    Raises:
        CommandError: that is no time.
    """
    thing.expire_time.FromMicroseconds(int((time.time() + seconds_of(lasts, "lasts")) * 1e6))


def says(rule: rule_pb2.Rule) -> str:
    """Return what a rule says, on one line."""
    effect = wording.value_name(rule_pb2.RuleEffect, rule.effect)
    patterns = [
        f"{pattern.argument}={pattern.equals_json.decode(errors='replace')}"
        if pattern.HasField("equals_json")
        else f"{pattern.argument} like {pattern.glob}"
        for pattern in rule.arguments
    ]
    where = f" where {' and '.join(patterns)}" if patterns else ""
    return wording.one_line(f"{effect} {rule.tool_name}{where}, {_where(rule)}", 300)


def _where_of(
    run: str | None, conversation: str | None, agent: str | None, *, everybody: bool
) -> tuple[rule_pb2.RuleScope.ValueType, str]:
    """Return the scope that options name, and its id."""
    named = [
        (scope, scope_id)
        for scope, scope_id in (
            (rule_pb2.RULE_SCOPE_RUN, run),
            (rule_pb2.RULE_SCOPE_CONVERSATION, conversation),
            (rule_pb2.RULE_SCOPE_AGENT, agent),
            (rule_pb2.RULE_SCOPE_STORE, "" if everybody else None),
        )
        if scope_id is not None
    ]
    if len(named) > 1:
        raise typer.BadParameter("give only one of --run, --conversation, --agent and --everybody")
    return named[0] if named else (rule_pb2.RULE_SCOPE_USER, "")


def _rule(
    effect: rule_pb2.RuleEffect.ValueType, tool: str, where: tuple[rule_pb2.RuleScope.ValueType, str], reason: str
) -> rule_pb2.Rule:
    scope, scope_id = where
    return rule_pb2.Rule(effect=effect, scope=scope, scope_id=scope_id, tool_name=tool, reason=reason)


async def _make(
    target: AsyncClient,
    console: Console,
    rule: rule_pb2.Rule,
    *,
    like: list[str] | None,
    equals: list[str] | None,
    lasts: str | None,
) -> None:
    for text in like or ():
        argument, value = _split(text, "like")
        rule.arguments.add(argument=argument, glob=value)
    for text in equals or ():
        argument, value = _split(text, "equals")
        rule.arguments.add(argument=argument, equals_json=value.encode())
    if lasts is not None:
        set_end(rule, lasts)
    made = await create(target, rule)
    console.print(f"Made {made.rule_id}: {says(made)}.", style="green", markup=False, soft_wrap=True)
    console.print(f"End it with: pawl rules revoke {made.rule_id}", markup=False, soft_wrap=True)


def _split(text: str, parameter: str) -> tuple[str, str]:
    argument, equals, value = text.partition("=")
    if not (argument and equals):
        raise CommandError(f"{text!r} is not of the form argument=value.", parameter=parameter)
    return argument, value


def _where(rule: rule_pb2.Rule) -> str:
    match rule.scope:
        case rule_pb2.RULE_SCOPE_STORE:
            return "for everybody"
        case rule_pb2.RULE_SCOPE_USER:
            return "for your runs"
        case rule_pb2.RULE_SCOPE_AGENT:
            return f"for runs of the agent {rule.scope_id}"
        case _:
            return f"in {rule.scope_id}"


def _row(rule: rule_pb2.Rule) -> tuple[str, ...]:
    effect = wording.value_name(rule_pb2.RuleEffect, rule.effect)
    ended = "revoked" if rule.HasField("revoke_time") else "suspended: the tool has changed" if rule.suspended else ""
    until = ended or (wording.time_text(rule.expire_time) if rule.HasField("expire_time") else "it is revoked")
    patterns = says(rule).partition(" where ")[2].rpartition(", ")[0]
    return (
        rule.rule_id,
        effect,
        wording.clean(rule.tool_name) + (f" where {patterns}" if patterns else ""),
        _where(rule),
        f"{rule.uses}/{rule.uses_max}" if rule.uses_max else str(rule.uses),
        until,
        wording.clean(rule.user_id),
    )
