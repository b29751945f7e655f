""".env.example lists what the settings classes read, no more and no less, with the true defaults."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from pawl.chassis.settings import ServiceSettings
from pawl.launcher.services import STAGES
from tests.tidy import tree

EXAMPLE = (tree.ROOT / ".env.example").read_text()
EVERY_SERVICE = "every service"
VARIABLE = re.compile(r"#([A-Z][A-Z0-9_]*)=(.*)")


def shown() -> dict[str, dict[str, str]]:
    """Variables of .env.example and their values, by section."""
    sections = re.split(r"^## (.+)$", EXAMPLE, flags=re.MULTILINE)[1:]
    return {name: dict(VARIABLE.findall(text)) for name, text in zip(sections[::2], sections[1::2], strict=True)}


def read_by(cls: type[BaseSettings]) -> dict[str, str]:
    """Variables that a settings class reads and their defaults; empty where it has none to show."""
    prefix = str(cls.model_config.get("env_prefix", ""))
    return {
        field.validation_alias if isinstance(field.validation_alias, str) else f"{prefix}{name}".upper(): default(field)
        for name, field in cls.model_fields.items()
    }


def default(field: FieldInfo) -> str:
    value = None if field.is_required() or field.default_factory else field.default
    return "" if value is None else str(value)


def classes() -> Iterator[tuple[str, type[BaseSettings]]]:
    """Every settings class of the services, by the name of its section."""
    for path in sorted(tree.PAWL.glob("*/settings.py")):
        module = importlib.import_module(f"pawl.{path.parent.name}.settings")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, BaseSettings) and cls.__module__ == module.__name__:
                yield EVERY_SERVICE if cls is ServiceSettings else path.parent.name.replace("_", "-"), cls


def test_the_example_shows_every_variable_with_its_default() -> None:
    common = read_by(ServiceSettings)
    expected: dict[str, dict[str, str]] = {EVERY_SERVICE: common}
    for section, cls in classes():
        if cls is not ServiceSettings:
            own = {name: value for name, value in read_by(cls).items() if common.get(name) != value}
            expected.setdefault(section, {}).update(own)
    without_class = {"pawl up", "pawl on the command line"}
    assert {section: variables for section, variables in shown().items() if section not in without_class} == expected


@pytest.mark.parametrize(
    ("section", "modules"),
    [
        ("pawl up", ["launcher/options.py"]),
        ("pawl on the command line", ["cli/__main__.py", "client/target.py", "chassis/local_key.py"]),
    ],
)
def test_the_example_shows_what_is_read_without_a_settings_class(section: str, modules: list[str]) -> None:
    source = "".join((tree.PAWL / module).read_text() for module in modules)
    elsewhere = {*read_by(ServiceSettings), *(shown()["pawl up"] if section != "pawl up" else ())}
    assert set(shown()[section]) == set(re.findall(r'"(PAWL_[A-Z_]+)"', source)) - elsewhere


def test_the_launcher_gives_each_service_what_it_reads_and_nothing_else() -> None:
    """A new setting belongs into services/pawl/launcher/services.py too."""
    connections = {
        "PAWL_INTERNAL_LISTEN",
        "PAWL_NATS_URL",
        "PAWL_NATS_CA_FILE",
        "PAWL_SERVICE_KEY",
        "PAWL_SERVICE_KEYS_FILE",
        *(name for name in read_by(ServiceSettings) if "DATABASE" in name),
    }
    settings = {section: set(read_by(cls)) for section, cls in classes() if section != EVERY_SERVICE}
    for spec in (spec for stage in STAGES for spec in stage):
        given = {name for name in spec.reads or () if name.startswith(("PAWL_", "OPENAI_"))}
        assert given <= settings[spec.name], spec.name
        assert settings[spec.name] - given <= connections, spec.name


def test_deployment_files_use_variables_that_are_read() -> None:
    known = {name for _, cls in classes() for name in read_by(cls)}
    known |= {f"{name}_FILE" for name in known}
    for file in (Path("docker-compose.yml"), Path("deploy/compose.env.example")):
        used = re.findall(r"\b((?:PAWL|OPENAI)_[A-Z0-9_]+)(?=[=:])", (tree.ROOT / file).read_text())
        assert set(used) <= known, file
