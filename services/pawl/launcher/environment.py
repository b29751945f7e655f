"""The environment of each process: what it reads, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pawl.chassis
from pawl.launcher.services import ServiceSpec

_OURS: Final = ("PAWL_", "OPENAI_")
# What any program may need to run at all. Proxies are not among it: their URLs may hold passwords.
_SYSTEM_VARIABLES: Final = (
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH SSL_CERT_FILE"
    " SSL_CERT_DIR PYTHONPATH PYTHONHOME PYTHONUTF8 PYTHONUNBUFFERED PYTHONWARNINGS PYTHONDEVMODE"
    " PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONASYNCIODEBUG PYTHONTRACEMALLOC PYTHONMALLOC VIRTUAL_ENV"
    " GRPC_VERBOSITY GRPC_TRACE GRPC_DNS_RESOLVER"
)
_SYSTEM: Final = frozenset(_SYSTEM_VARIABLES.split())
_LOCALE: Final = "LC_"


def system_environment(outer: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return what a program needs of the environment of this process, and of what is added to it.

    Children import the same Pawl as this process, wherever it is started from.
    """
    found = {name: value for name, value in {**outer, **added}.items() if name in _SYSTEM or name.startswith(_LOCALE)}
    root = str(Path(pawl.chassis.__path__[0]).parents[1])
    return found | {"PYTHONPATH": os.pathsep.join(part for part in (root, found.get("PYTHONPATH", "")) if part)}


def read_by(spec: ServiceSpec, variables: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that a service reads, in the form of a file too."""
    if spec.reads is None:
        return {name: value for name, value in variables.items() if name.startswith(_OURS)}
    return {
        name: value
        for name, value in variables.items()
        if name in spec.reads or name.removesuffix("_FILE") in spec.reads
    }
