"""The system account of the embedded PostgreSQL.

PostgreSQL refuses to run as root. Started by root, it gets an account of its own; started by anybody else, it runs as
that user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path

from pawl.chassis import logs

ACCOUNT = "pgserver"
"""The account that the PostgreSQL wheel, too, makes for this purpose."""

_FALLBACK = "nobody"

_log = logs.get_logger(__name__)


def database_account() -> tuple[int, int] | None:
    """Return the user and group to switch to, made if need be; None if no switch is needed."""
    if os.geteuid() != 0:
        return None
    if not _exists(ACCOUNT) and (useradd := shutil.which("useradd")):
        # Fails where another launcher is just making it, and where there is nothing to write to.
        subprocess.run([useradd, "--system", "--no-create-home", ACCOUNT], capture_output=True, check=False)
    entry = pwd.getpwnam(ACCOUNT if _exists(ACCOUNT) else _FALLBACK)
    return entry.pw_uid, entry.pw_gid


def let_through(path: Path) -> None:
    """Lets other accounts pass the folders above `path`, without letting them list what is in there."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
            _log.warning("folder.opened", folder=str(folder), because="PostgreSQL does not run as root")


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
