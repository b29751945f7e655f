""".env.example lists exactly the settings that the classes read, with their defaults."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from pawl.launcher.services import STAGES
from pawl.server.process.settings import CONSTANT, ServiceSettings
from tests.tidy import tree

# Two kinds of users must need an option; otherwise it is a constant.
SETTINGS_MAX = 61
EXAMPLE = (tree.ROOT / ".env.example").read_text()
# The comment, name and value of each variable of .env.example.
SHOWN = re.findall(r"((?:^# .*\n)+)#([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.MULTILINE)
# Modules that read variables without a settings class.
OF_CLIENTS = (
    *(tree.PAWL / module for module in ("launcher/options.py", "cli/__main__.py")),
    *(tree.CLIENT / module for module in ("client/target.py", "chassis/identity/local_key.py")),
)


def variables(cls: type[ServiceSettings]) -> dict[str, str]:
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else f"PAWL_{name}".upper(): default(field)
        for name, field in cls.model_fields.items()
        if CONSTANT not in field.metadata
    }


def default(field: FieldInfo) -> str:
    value = field.default
    return str(value) if isinstance(value, str | int | float | Path) else ""


def classes() -> Iterator[tuple[str, type[ServiceSettings]]]:
    for path in sorted(tree.PAWL.glob("*/settings.py")):
        module = importlib.import_module(f"pawl.{path.parent.name}.settings")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, ServiceSettings) and cls is not ServiceSettings:
                yield path.parent.name.replace("_", "-"), cls


def test_example_shows_every_variable_once_with_its_default() -> None:
    defaults: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for service, cls in classes():
        for name, value in variables(cls).items():
            defaults[name][service] = value
    read = {
        name
        for module in OF_CLIENTS
        for name in re.findall(r'"(PAWL_[A-Z_]+)"', module.read_text())
        if name not in defaults
    }
    assert sorted(name for _, name, _ in SHOWN) == sorted({*defaults, *read, "PAWL_DATA"})
    for comment, name, value in SHOWN:
        known = set(defaults[name].values()) or {value}
        if len(known) == 1:
            assert {value} == known, name
        else:
            words = " ".join(re.findall(r"[^\s#]+", comment))
            missing = [f"{each} {its}" for each, its in defaults[name].items() if its and f"{each} {its}" not in words]
            assert (missing, value) == ([], ""), name


def test_number_of_settings_is_limited() -> None:
    assert len(SHOWN) <= SETTINGS_MAX


def test_comments_are_short() -> None:
    assert [name for comment, name, _ in SHOWN if comment.count("\n") > 2] == []


def test_launcher_gives_each_service_exactly_its_variables() -> None:
    """New settings must be added to services/pawl/launcher/services.py."""
    connections = {
        "PAWL_INTERNAL_LISTEN",
        "PAWL_NATS_URL",
        "PAWL_SERVICE_KEY",
        "PAWL_SERVICE_KEYS_FILE",
        *(name for name in variables(ServiceSettings) if "DATABASE" in name),
    }
    settings = {service: set(variables(cls)) for service, cls in classes()}
    for spec in (spec for stage in STAGES for spec in stage):
        given = {name for name in spec.reads or () if name.startswith(("PAWL_", "OPENAI_"))}
        assert given <= settings[spec.name], spec.name
        assert settings[spec.name] - given <= connections, spec.name


def test_variables_in_deployment_files_exist() -> None:
    known = {name for _, cls in classes() for name in variables(cls)}
    known |= {f"{name}_FILE" for name in known}
    for file in (Path("docker-compose.yml"), Path("deploy/compose.env.example")):
        used = re.findall(r"\b((?:PAWL|OPENAI)_[A-Z0-9_]+)(?=[=:])", (tree.ROOT / file).read_text())
        assert set(used) <= known, file
