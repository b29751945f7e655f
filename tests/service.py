"""Runs a service with changed constants: `python -m tests.service job_store '{"crashes_max": 4}'`."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pawl.launcher.services import STAGES, ServiceSpec


def command(package: str, **constants: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.service", package, json.dumps(constants))


def stages(**constants: Mapping[str, object]) -> tuple[tuple[ServiceSpec, ...], ...]:
    return tuple(tuple(_changed(spec, constants) for spec in stage) for stage in STAGES)


def _changed(spec: ServiceSpec, constants: Mapping[str, Mapping[str, object]]) -> ServiceSpec:
    package = spec.name.replace("-", "_")
    return replace(spec, command=command(package, **constants[package])) if package in constants else spec


def _main(package: str, constants: Mapping[str, Any]) -> None:
    module = importlib.import_module(f"pawl.{package}.settings")
    settings = getattr(module, f"{package.title().replace('_', '')}Settings")
    for name, value in constants.items():
        settings.model_fields[name].default = value
    settings.model_rebuild(force=True)
    runpy.run_module(f"pawl.{package}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
