"""Reference pages generated from the code: error reasons, settings, commands, events and metrics."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer.main
import yaml

from docs.site.contract import Contract, anchor, escaped, linked_pages
from pawl.cli.__main__ import app

_ROOT: Final = Path(__file__).parents[2]
_SERVICES: Final = _ROOT / "services/pawl"
_ALERTS: Final = _ROOT / "deploy/alerts.yml"
_SETTING: Final = re.compile(r"((?:^# .*\n)+)#([A-Z][A-Z0-9_]*)=(.*)$", re.MULTILINE)
_COLUMNS: Final = 100


def pages(contract: Contract) -> dict[str, str]:
    """Return the generated pages by path."""
    return {
        "reference/errors.md": "\n".join(_errors(contract)),
        "reference/settings.md": "\n".join(_settings()),
        "reference/cli.md": "\n".join(_commands()),
        "reference/events.md": "\n".join(_events(contract)),
        "reference/metrics.md": "\n".join(_metrics()),
        "reference/alerts.md": "\n".join(_alerts()),
    }


def _errors(contract: Contract) -> Iterator[str]:
    yield "# Error reasons\n"
    yield "An error of a Pawl service has a gRPC code and a `google.rpc.ErrorInfo` detail with the domain `pawl` and"
    yield "one of these reasons. Branch on the reason and show people the message. Treat an unknown reason as its code"
    yield "alone.\n"
    codes: defaultdict[str, list[str]] = defaultdict(list)
    for reason, comment in contract.reasons.items():
        code, _, text = " ".join(comment.split()).partition(". ")
        codes[code].append(f'| <span id="{anchor(reason)}"></span>`{reason}` | {_cell(text)} |')
    for code, rows in codes.items():
        yield f"## {code}\n\n| reason | meaning |\n|---|---|"
        yield "\n".join(rows) + "\n"


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "Services read their settings from environment variables. `pawl up` sets what its services need. A"
    yield "secret can also be given as `NAME_FILE`, the path of a file that holds it.\n"
    for section in re.split(r"^## ", (_ROOT / ".env.example").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        yield f"## {title[0].upper()}{title[1:]}\n\n| variable | default | description |\n|---|---|---|"
        for comment, name, default in _SETTING.findall(text):
            meaning = linked_pages(_cell(re.sub(r"^# ?", "", comment, flags=re.MULTILINE)), "reference/settings.md")
            yield f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |"
        yield ""


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "The output of `pawl COMMAND --help`. The options of `pawl` itself may come before or after the command.\n"
    yield from _command(typer.main.get_command(app), None, "pawl")


def _command(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = command.context_class(
        command, info_name=name, parent=parent, max_content_width=_COLUMNS, terminal_width=_COLUMNS
    )
    path = context.command_path
    yield f"{'#' * min(3, path.count(' ') + 2)} {path}\n"
    text = command.get_help(context) if command.add_help_option else _printed(path)
    yield f"```text\n{text.rstrip()}\n```\n"
    for child in getattr(command, "commands", {}).values():
        if not child.hidden:
            yield from _command(child, context, child.name)


def _printed(path: str) -> str:
    """Return the help of a command that parses its own arguments."""
    call = [sys.executable, "-m", "pawl.cli", *path.split()[1:], "--help"]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout


def _events(contract: Contract) -> Iterator[str]:
    page = "reference/events.md"
    yield "# Events\n"
    yield "Every run has a log of events. [WatchRun](api/agent-service.md#watchrun) streams it; NATS carries it live."
    yield linked_pages("docs/reference/nats.md has examples, headers and retention.\n", page)
    yield "## Subjects\n\n| subject | published by |\n|---|---|"
    for subject, services in sorted(_subjects().items()):
        yield f"| `{subject}` | {', '.join(sorted(services))} |"
    event = contract.types["pawl.event.v1.RunEvent"]
    comments = {member.name: comment for member, comment in event.members}
    yield f"\n## Types\n\n`type` of a {contract.link(event.name, page)}: {_cell(comments['type'])}\n"
    yield "## Payloads\n\nEach event has exactly one payload.\n\n| field | type | description |\n|---|---|---|"
    for member, comment in event.members:
        if member.HasField("oneof_index") and not member.proto3_optional:
            yield f"| `{member.name}` | {contract.link(member.type_name[1:], page)} | {_cell(comment)} |"
    yield ""


def _subjects() -> dict[str, set[str]]:
    """Return the public NATS subjects, each with the services that publish on it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, service in _modules():
        nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        subscribed = {each for call in calls if "subscribe" in ast.unparse(call.func) for each in call.args}
        for node in nodes:
            subject = _template(node) if isinstance(node, ast.JoinedStr) and node not in subscribed else ""
            if subject.startswith("pawl.v1.") and "*" not in subject:
                found[subject].add(service.replace("_", "-"))
    return found


def _template(node: ast.JoinedStr) -> str:
    """Return an f-string as text, with the last part of each name in angle brackets."""
    return "".join(
        f"<{ast.unparse(part.value).rpartition('.')[2]}>" if isinstance(part, ast.FormattedValue) else _text(part)
        for part in node.values
    )


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _metrics() -> Iterator[str]:
    yield "# Metrics\n"
    yield "Every process serves its metrics in the Prometheus format at `/metrics` of `PAWL_METRICS_LISTEN`.\n"
    yield "The first 100 stores that a process sees have their own label `store`; all others are `other`.\n"
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for module, service in _modules():
        prefix = "<service>" if service == "server" else service
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_metric = node.func.attr in {"counter", "gauge", "histogram"} and len(node.args) > 1
            if is_metric and isinstance(node.args[0], ast.Constant):
                name, text = (ast.literal_eval(argument) for argument in node.args[:2])
                labels = ", ".join(f"`{each}`" for each in (ast.literal_eval(node.args[2]) if node.args[2:] else ()))
                rows[service].append(f"| `pawl_{prefix}_{name}` | {node.func.attr} | {labels} | {_cell(text)} |")
    for service in sorted(rows, key=lambda each: (each != "server", each)):
        title = "Every service" if service == "server" else service.replace("_", "-")
        yield f"## {title}\n\n| metric | type | labels | description |\n|---|---|---|---|"
        yield "\n".join(sorted(rows[service])) + "\n"


def _alerts() -> Iterator[str]:
    yield "# Alerts\n"
    yield "Rules of `deploy/alerts.yml`, and how to respond: to `page` now, to `warn` on the same day.\n"
    yield "| alert | severity | meaning | response |\n|---|---|---|---|"
    for group in yaml.safe_load(_ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            severity, about = rule["labels"]["severity"], rule["annotations"]
            meaning = re.sub(r"{{ \$(?:labels\.)?(\w+) }}", lambda match: match[1].upper(), about["summary"])
            yield f"| `{rule['alert']}` | {severity} | {_cell(meaning)} | {_cell(about['runbook'])} |"


def _modules() -> Iterator[tuple[Path, str]]:
    """Yield each module of the services, with the folder of its service."""
    for module in sorted(_SERVICES.rglob("*.py")):
        yield module, module.relative_to(_SERVICES).parts[0]


def _cell(text: str) -> str:
    return escaped(" ".join(text.split())).replace("|", "\\|")
