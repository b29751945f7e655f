"""Implements `pawl rules`, `keys`, `audit` and `whoami`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, say, seconds_of
from pawl.cli.contract import Json, Option, Options, json_line, listing, verb
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.identity.v1 import key_pb2
from pawl.tool.v1 import audit_pb2, rule_pb2

_HEAD: Final = re.compile(r"(head )?(?P<seq>[1-9][0-9]{0,17}):(?P<hash>[0-9a-fA-F]{64})")
ENDS: Final = "How long it is valid: 30m, 2h, 7d. Default: until revoked."


def set_end(thing: Any, lasts: str) -> None:
    """Set the expiry of a rule or key from a duration such as 30m, 2h or 7d."""
    thing.expire_time.FromMicroseconds(int((time.time() + seconds_of(lasts, "expire_time")) * 1e6))


def _scope(scope: rule_pb2.RuleScope.ValueType) -> Callable[[rule_pb2.Rule, str], None]:
    def put(rule: rule_pb2.Rule, scope_id: str) -> None:
        if rule.scope != rule_pb2.RULE_SCOPE_USER:
            raise CommandError("Specify at most one of --run, --conversation, --agent and --all-users.")
        if not scope_id:
            raise CommandError("the value must not be empty. Omit the option to include all.", parameter="scope_id")
        rule.scope, rule.scope_id = scope, scope_id

    return put


def _patterns(parameter: str, field: str) -> Callable[[rule_pb2.Rule, list[str]], None]:
    def put(rule: rule_pb2.Rule, typed: list[str]) -> None:
        for each in typed:
            argument, equals, value = each.partition("=")
            if not (argument and equals):
                raise CommandError(f"{each!r} must be argument=value.", parameter=parameter)
            pattern = rule.arguments.add(argument=argument)
            setattr(pattern, field, value.encode() if field == "equals_json" else value)

    return put


_STRICT: Final[Options] = {
    "tool": "rule.tool_name",
    "--all-users": Option(
        path="rule.scope",
        help="For all users of the store; requires the admin role.",
        constant=rule_pb2.RULE_SCOPE_STORE,
    ),
    "--run": Option(path="rule.scope_id", help="Only in this run.", put=_scope(rule_pb2.RULE_SCOPE_RUN)),
    "--conversation": Option(
        path="rule.scope_id", help="Only in this conversation.", put=_scope(rule_pb2.RULE_SCOPE_CONVERSATION)
    ),
    "--agent": Option(
        path="rule.scope_id",
        help="For all the store's runs of this agent; requires the admin role.",
        put=_scope(rule_pb2.RULE_SCOPE_AGENT),
    ),
    "--like": Option(
        path="rule.arguments",
        help="argument=text, where * and ? are wildcards, for example to=*@example.com. Repeatable.",
        put=_patterns("arguments", "glob"),
    ),
    "--equals": Option(
        path="rule.arguments",
        help="argument=JSON, for example amount=5. Repeatable.",
        put=_patterns("equals", "equals_json"),
    ),
    "--for": Option(path="rule.expire_time", help=ENDS, put=set_end),
    "--reason": "rule.reason",
}
_ALLOW: Final[Options] = {
    **_STRICT,
    "--uses": "rule.uses_max",
    "--items": "rule.items_max",
    "--destructive": "rule.includes_destructive",
}


def _rule(effect: rule_pb2.RuleEffect.ValueType) -> rule_pb2.CreateRuleRequest:
    return rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(effect=effect, scope=rule_pb2.RULE_SCOPE_USER))


def rule_text(rule: rule_pb2.Rule) -> str:
    return wording.one_line(f"{wording.text_at(rule, 'effect')} {_calls_text(rule)}, {_scope_text(rule)}", 300)


def _calls_text(rule: rule_pb2.Rule) -> str:
    patterns = [
        f"{each.argument}={each.equals_json.decode(errors='replace')}"
        if each.HasField("equals_json")
        else f"{each.argument} like {each.glob}"
        for each in rule.arguments
    ]
    return wording.one_line(rule.tool_name + (f" where {' and '.join(patterns)}" if patterns else ""), 300)


def _scope_text(rule: rule_pb2.Rule) -> str:
    of_agent = f"for runs of the agent {rule.scope_id}" if rule.scope == rule_pb2.RULE_SCOPE_AGENT else ""
    everywhere = {rule_pb2.RULE_SCOPE_STORE: "for all users", rule_pb2.RULE_SCOPE_USER: "for your runs"}
    return of_agent or everywhere.get(rule.scope, f"in {rule.scope_id}")


def _until(rule: rule_pb2.Rule) -> str:
    ended = "revoked" if rule.HasField("revoke_time") else "suspended: the tool has changed" if rule.suspended else ""
    return ended or wording.text_at(rule, "expire_time") or "until revoked"


def _rule_created(answer: Any, _: Any) -> list[str]:
    rule_id = answer.rule.rule_id
    return [f"Created {rule_id}: {rule_text(answer.rule)}.", f"Revoke it with: pawl rules revoke {rule_id}"]


rules = typer.Typer(help="Manage rules that allow, gate or deny calls.", no_args_is_help=True)
rules.command("allow")(
    verb(
        _rule(rule_pb2.RULE_EFFECT_ALLOW),
        _ALLOW,
        "Let calls run without approval. `pawl rules allow '*' --for 1h` trusts all tools for an hour.",
        _rule_created,
    )
)
rules.command("ask")(
    verb(
        _rule(rule_pb2.RULE_EFFECT_ASK),
        _STRICT,
        "Require an approval for each call, regardless of the tool's category.",
        _rule_created,
    )
)
rules.command("deny")(verb(_rule(rule_pb2.RULE_EFFECT_DENY), _STRICT, "Deny calls without asking.", _rule_created))
rules.command("revoke")(
    verb(
        rule_pb2.RevokeRuleRequest(),
        {"rule": "rule_id"},
        "Revoke a rule permanently.",
        "Revoked {rule_id}. It no longer applies to calls that have not started.",
    )
)
rules.command("list")(
    listing(
        rule_pb2.ListRulesRequest(),
        {"--all": "include_ended", "--all-users": "all_users"},
        "List your rules and the store's, newest first.",
        {
            "rule": "rule_id",
            "effect": "effect",
            "tool": _calls_text,
            "where": _scope_text,
            "calls": lambda rule: f"{rule.uses}/{rule.uses_max}" if rule.uses_max else str(rule.uses),
            "until": _until,
            "by": "user_id",
        },
        none="There are no rules. Each tool's category decides.",
    )
)


def _key_end(key: key_pb2.Key) -> str:
    until = wording.text_at(key, "expire_time") or "until revoked"
    if key.HasField("revoke_time"):
        return f"revoked {wording.time_text(key.revoke_time)} by {wording.clean(key.revoke_user_id)}"
    is_over = key.HasField("expire_time") and key.expire_time.ToDatetime(tzinfo=UTC) <= datetime.now(UTC)
    return f"expired {until}" if is_over else until


def _for(user_id: str, delegate_user_id: str) -> str:
    return wording.clean(f"{delegate_user_id} for {user_id}" if delegate_user_id else user_id)


keys = typer.Typer(
    help="Create, list and revoke API keys. Requires the operator or the deployment role.",
    no_args_is_help=True,
)
keys.command("create")(
    verb(
        key_pb2.CreateKeyRequest(),
        {
            "user": "key.user_id",
            "--role": "key.roles",
            "--name": "key.name",
            "--for": Option(path="key.expire_time", help=ENDS, put=set_end),
            "--store": "key.store_id",
            "--decides-for-users": "key.decides_for_users",
        },
        "Create a key. Its secret is shown once, alone on standard output.",
        lambda answer, _: f"Created {answer.key.key_id}. Revoke it with: pawl keys revoke {answer.key.key_id}",
    )
)
keys.command("list")(
    listing(
        key_pb2.ListKeysRequest(),
        {"--all": "include_ended", "--store": "store_id"},
        "List keys, newest first.",
        {
            "key": "key_id",
            "user": "user_id",
            "roles": lambda key: ", ".join(key.roles) or "none",
            "until": _key_end,
            "last used": lambda key: wording.text_at(key, "last_use_time") or "never",
            "created by": lambda key: wording.clean(key.create_user_id) or "bootstrap",
            "name": "name",
        },
        none="There are no keys.",
    )
)
keys.command("revoke")(
    verb(
        key_pb2.RevokeKeyRequest(),
        {"key": "key_id"},
        "Revoke a key permanently. All services refuse it within five seconds.",
        "Revoked {key_id}.",
    )
)
keys.command("events")(
    listing(
        key_pb2.ListKeyEventsRequest(),
        {"--key": "key_id", "--kind": "kind", "--store": "store_id"},
        "List who created and revoked keys, newest last.",
        {
            "event": "event_id",
            "time": "time",
            "what": "kind",
            "store": "store_id",
            "key": "key_id",
            "user": "user_id",
            "roles": lambda event: ", ".join(event.roles) or ("none" if event.key_id else ""),
            "by": lambda event: (
                f"{_for(event.by_user_id, event.by_delegate_user_id)} ({event.by_credential_id})"
                if event.by_user_id
                else ""
            ),
            "name": "key_name",
        },
        none="There are no matching events.",
        count=50,
        newest_last=True,
    )
)


def _verdict(entry: audit_pb2.AuditEntry) -> str:
    by = f" by {_for(entry.by_user_id, entry.by_delegate_user_id)}" if entry.by_user_id else ""
    return f"{entry.verdict.lower()}{by}"


audit = typer.Typer(
    help="List and verify the store's audit chain. With API keys, requires the operator or admin role.",
    no_args_is_help=True,
)
audit.command("list")(
    listing(
        audit_pb2.ListAuditRequest(),
        {
            "--run": "run_id",
            "--call": "call_id",
            "--tool": "tool_name",
            "--of-user": "user_id",
            "--agent": "agent_name",
            "--kind": "kind",
            "--since": "since_time",
            "--before": "before_time",
        },
        "List entries in the audit chain, newest last.",
        {
            "seq": "seq",
            "time": "time",
            "what": "kind",
            "tool": "tool_name",
            "call": "call_id",
            "user": lambda entry: _for(entry.user_id, entry.delegate_user_id),
            "credential": lambda entry: entry.by_credential_id or entry.credential_id,
            "verdict": _verdict,
            "reason": "reason",
        },
        none="There are no matching entries.",
        count=50,
        newest_last=True,
    )
)


@audit.command()
@command(service="tools")
async def verify(
    target: AsyncClient,
    console: Console,
    *,
    known_head: Annotated[str, typer.Option(help="A head that an earlier run of this command printed.")] = "",
) -> int:
    """Verify the whole audit chain.

    Prints the head of the chain. Store it where no one with write access to the database can change it, and pass it as
    --known-head next time.
    """
    request, last = audit_pb2.VerifyAuditRequest(), audit_pb2.VerifyAuditResponse()
    if known_head:
        match = _HEAD.fullmatch(known_head)
        if match is None:
            raise CommandError(f"{known_head!r} is not a head such as 12:<64 hex digits>.", parameter="known_head")
        request.known_seq, request.known_hash = int(match["seq"]), match["hash"]
    async for answer in target.auditor.VerifyAudit(request):
        last = answer
    if last.HasField("problem"):
        problem = wording.clean(last.problem.explanation)
        say(console, f"{last.problem.kind}: {problem}. The entries before it are intact.", "red")
        return EXIT_UNSUCCESSFUL
    say(console, f"The audit chain is intact: {last.verified_seq} entries.")
    if last.verified_seq:
        say(console, f"head {last.verified_seq}:{last.verified_hash}")
    return 0


_CALLER: Final = ("roles", "credential_id", "delegate_user_id", "expire_time", "decision_right")
_DEPLOYMENT: Final = ("version", "model", "approvals_required", "tool_count", "agent_names", "part_kinds")


@command()
async def whoami(
    target: AsyncClient,
    console: Console,
    *,
    limits: Annotated[bool, typer.Option("--limits", help="Also show run limits and their maximums.")] = False,
    json: Json = False,
) -> None:
    """Show your identity and permissions.

    Also shows the deployment's features.
    """
    found = await target.whoami()
    caller, deployment = found.caller, found.deployment
    where = f"in the store {caller.store_id}" if caller.store_id else "of the deployment"
    shown = [
        f"{wording.clean(caller.user_id)} {where}",
        *wording.described(caller, only=_CALLER),
        *wording.described(deployment, only=(*_DEPLOYMENT, *(("limits", "ceilings") if limits else ()))),
    ]
    say(console, json_line(found) if json else shown)
