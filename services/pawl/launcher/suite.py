"""The suite as one object, for `pawl up` and for tests that run it in their own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
from collections.abc import Mapping
from typing import Self

import msgspec

from pawl.chassis.identity.local_key import LOCAL_KEY
from pawl.chassis.process import logs
from pawl.chassis.rpc.replicas import Endpoints, Replica
from pawl.launcher import orphans
from pawl.launcher.folder import DataFolder, SecretFiles, remove_endpoints, write_endpoints
from pawl.launcher.nats import USERS, Nats
from pawl.launcher.options import SuiteOptions
from pawl.launcher.plan import (
    MODEL_ID,
    OWNER_URL,
    SERVICE_KEYS,
    SuiteContext,
    authority_of,
    database_url_file,
    has_keys,
    has_owner,
    model_process,
    nats_url_file,
    process_name,
    service_key_file,
    service_process,
)
from pawl.launcher.ports import check_ports, free_port
from pawl.launcher.postgres import ROLES, Postgres
from pawl.launcher.processes import Process, ProcessSpec
from pawl.launcher.services import ServiceSpec
from pawl.server.identity.browser_seal import SEAL_FILE

SUBSCRIBER = "subscriber"
# Problems of the product that `pawl dev` runs, as a JSON list of lines, for the console.
PROBLEMS_FILE = "problems.json"
_ROTATE_SECONDS = 10.0
_LOAD_SECONDS = 30.0
_POLL_SECONDS = 0.05

_log = logs.get_logger(__name__)


class Suite:
    """Starts all processes on entry, and stops them in reverse order on exit.

    The embedded servers start first, then all services together. A process that dies is restarted. `stop` is
    idempotent. If `start` fails or is cancelled, it stops the processes it has started.
    """

    def __init__(self, options: SuiteOptions) -> None:
        stages = (
            tuple(spec for spec in stage if not spec.needs or options.environment.get(spec.needs))
            for stage in options.stages
        )
        self.options = dataclasses.replace(options, stages=tuple(stages))
        self.folder = DataFolder(options.data)
        self._processes: dict[str, Process] = {}
        self._nats: Nats | None = None
        self._postgres: Postgres | None = None
        self._secrets: SecretFiles | None = None
        self._housekeeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all processes and wait until they are ready. Raise StartError with one sentence if that fails."""
        secrets = self._secrets = self.folder.open()
        try:
            (self.folder.run / PROBLEMS_FILE).unlink(missing_ok=True)
            for name in await orphans.stop_all(self.folder.run):
                _log.warning("process.orphan_stopped", process=name)
            self._check_ports()
            # Services that start before the gateway get its address.
            gateway = self.options.port("gateway") or free_port()
            self.options = dataclasses.replace(self.options, ports={**self.options.ports, "gateway": gateway})
            self._write_service_keys(secrets)
            self._write_local_key(secrets)
            context = SuiteContext(
                options=self.options, folder=self.folder, secrets=secrets, peers=self._peers, model=self._model
            )
            await self._start_embedded(context)
            for spec in (spec for stage in self.options.stages for spec in stage):
                for replica in range(self.options.replicas.get(spec.name, 1)):
                    self._add(service_process(spec, replica, context))
            for process in self._processes.values():
                process.start()
            await self._wait_ready(*self._processes)
            self._housekeeping = asyncio.create_task(self._rotate_logs())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all processes in reverse order, and release the data folder."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
            self._housekeeping = None
        for process in reversed(self._processes.values()):
            await process.stop()
        if self._secrets is not None:
            remove_endpoints(self.folder.path)
            self.folder.close()
            self._secrets = None

    # Addresses and credentials.

    @property
    def endpoints(self) -> Endpoints:
        specs = [spec for stage in self.options.stages for spec in stage]
        return Endpoints(
            launcher_pid=os.getpid(),
            data=str(self.folder.path),
            secrets=str(self.folder.path / "secrets"),
            services={spec.name: self._replicas(spec) for spec in specs},
            nats=self._nats.url if self._nats else None,
            postgres=(self._address("postgres", "postgres") or None),
            model_base_url=f"http://{model}/v1" if (model := self._address("model", "http")) else None,
            authority=next((str(found) for spec in specs if (found := authority_of(spec, self.options))), None),
        )

    @property
    def loaded_tools(self) -> list[str]:
        """Names of the tools from the last time that PAWL_TOOLS was loaded."""
        entries = (entry for process in self._processes.values() for entry in process.log.events("tool.loaded"))
        modules = (entry.get("tools", []) for entry in entries if entry.get("source", "").startswith("module:"))
        return sorted({name for names in modules for name in names})

    @property
    def broken_tools(self) -> list[str]:
        """Modules that failed the last time that PAWL_TOOLS was loaded, each with its error."""
        entries = (entry for process in self._processes.values() for entry in process.log.events("tool.module_broken"))
        return list(dict.fromkeys(f"{entry.get('tool_module')}: error: {entry.get('error')}" for entry in entries))

    @property
    def database_url(self) -> str:
        """The URL of PostgreSQL, including the password. For the embedded server, it is the owner's URL."""
        return self._secret_files.get("database.url")

    def nats_url(self, user: str = SUBSCRIBER) -> str:
        """Return the NATS URL for a user, including the password."""
        return self._secret_files.get(nats_url_file(user))

    @property
    def local_key(self) -> str:
        """The key for callers on this machine. It is valid only if callers do not have their own keys."""
        return self._secret_files.get(LOCAL_KEY)

    def process(self, name: str, replica: int = 0) -> Process:
        """Return one process: a service, or `postgres`, `nats`, `model`. Raise KeyError if it does not exist."""
        return self._processes[process_name(name, replica)]

    def pid(self, name: str, replica: int = 0) -> int | None:
        """Return the id of a process, or None while it is down."""
        return self.process(name, replica).pid

    # Control for tests.

    def kill(self, name: str, replica: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process. If the process dies, it is restarted.

        If the process is down, SIGKILL has no effect, and other signals raise ProcessLookupError.
        """
        with contextlib.suppress(*((ProcessLookupError,) if number == signal.SIGKILL else ())):
            self.process(name, replica).send_signal(number)

    async def wait_ready(self, name: str, replica: int = 0) -> None:
        """Return when the process is ready. If it was killed, this means that it has restarted."""
        await self.process(name, replica).wait_ready(self.options.ready_seconds)

    async def stop_process(self, name: str, replica: int = 0) -> None:
        """Stop a process gracefully and leave it down until `start_process` is called."""
        await self.process(name, replica).stop()

    async def start_process(self, name: str, replica: int = 0) -> None:
        """Start a stopped process with the same addresses, and return when it is ready."""
        self.process(name, replica).start()
        await self.wait_ready(name, replica)

    async def reload_tools(self) -> None:
        """Make the tool registry import the files in PAWL_TOOLS again, and wait until it has. Running calls continue.

        Raises:
            StartError: The registry does not respond and cannot be restarted.
        """
        process = self.process("tool-registry")
        process.log.mark()
        # If the registry is down, it loads the tools when it restarts.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                while not any(process.log.events("tool.modules_loaded")):  # noqa: ASYNC110  # another process writes the log
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await process.stop()
            await self.start_process("tool-registry")

    # Implementation.

    @property
    def _secret_files(self) -> SecretFiles:
        if self._secrets is None:
            raise RuntimeError("the suite has not been started")
        return self._secrets

    def _write_service_keys(self, secrets: SecretFiles) -> None:
        names = [spec.name for stage in self.options.stages for spec in stage]
        keys = {name: secrets.get(service_key_file(name)) for name in names}
        digests = {name: [hashlib.sha256(key.encode()).hexdigest()] for name, key in keys.items()}
        secrets.put(SERVICE_KEYS, msgspec.json.encode(digests).decode())

    def _write_local_key(self, secrets: SecretFiles) -> None:
        if has_keys(self.options):
            secrets.remove(LOCAL_KEY)
        elif self.options.local_key:
            secrets.put(LOCAL_KEY, self.options.local_key)
        else:
            secrets.get(LOCAL_KEY)
        secrets.get(SEAL_FILE)

    def _check_ports(self) -> None:
        replaced = {
            "postgres": self.options.database_url is not None,
            "nats": self.options.nats_url is not None,
            "model": not self.options.scripted_model,
        }
        check_ports({name: port for name, port in self.options.ports.items() if not replaced.get(name, False)})

    async def _start_embedded(self, context: SuiteContext) -> None:
        options, secrets = self.options, context.secrets
        if options.database_url is None:
            port = options.port("postgres") or free_port()
            self._postgres = Postgres(folder=self.folder.postgres, port=port, secrets=secrets)
            self._add(self._postgres.spec())
        if options.nats_url is None:
            self._nats = Nats(folder=self.folder.nats, port=options.port("nats") or free_port(), secrets=secrets)
            self._nats.prepare()
            self._add(self._nats.spec()).start()
        if options.scripted_model:
            self._add(model_process(context)).start()
        if self._postgres is not None:
            await self._postgres.prepare()
            self.process("postgres").start()
        self._put_database_urls(secrets)
        for user in USERS:
            secrets.put(nats_url_file(user), options.nats_url or (self._nats.url_of(user) if self._nats else ""))
        await self._wait_ready(*(name for name in self._processes if name != "model"))

    async def _wait_ready(self, *names: str) -> None:
        await asyncio.gather(*(self._processes[name].wait_ready(self.options.ready_seconds) for name in names))

    def _put_database_urls(self, secrets: SecretFiles) -> None:
        options, postgres = self.options, self._postgres
        url = options.database_url or (postgres.url if postgres else "")
        secrets.put("database.url", url)
        if has_owner(options):
            secrets.put(OWNER_URL, options.database_owner_url or url)
        else:
            secrets.remove(OWNER_URL)
        for role in {*ROLES, *(spec.role for stage in options.stages for spec in stage if spec.role)}:
            own = postgres.url_of(role) if postgres and role in ROLES else options.database_url
            secrets.put(database_url_file(role), own or "")

    def _add(self, spec: ProcessSpec) -> Process:
        process = Process(
            spec,
            run_directory=self.folder.run,
            log_directory=self.folder.logs,
            changed=lambda: write_endpoints(self.endpoints),
        )
        self._processes[spec.name] = process
        return process

    def _peers(self, asking: ServiceSpec) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for stage in self.options.stages:
            if asking in stage:
                break
            for spec in stage:
                listens = [self._processes[name].spec.listens for name in self._names(spec)]
                # The gateway is a client, and clients cannot use the internal addresses.
                addresses = ((asking.role and each.get("internal")) or each["public"] for each in listens)
                found[spec.address_variable] = ",".join(addresses)
        return found

    def _names(self, spec: ServiceSpec) -> list[str]:
        return [process_name(spec.name, number) for number in range(self.options.replicas.get(spec.name, 1))]

    def _model(self) -> Mapping[str, str]:
        if not self.options.scripted_model:
            return {}
        url = f"http://{self._processes['model'].spec.listens['public']}/v1"
        return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": MODEL_ID, "PAWL_MODEL": MODEL_ID}

    def _replicas(self, spec: ServiceSpec) -> list[Replica]:
        return [
            Replica(
                grpc=self._address(name, "grpc"),
                http=self._address(name, "http"),
                metrics=self._address(name, "metrics"),
                pid=self._processes[name].pid,
                ready=self._processes[name].ready,
            )
            for name in self._names(spec)
            if name in self._processes
        ]

    def _address(self, process: str, protocol: str) -> str:
        found = self._processes[process].addresses if process in self._processes else None
        return found.get(protocol, "") if found else ""

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_SECONDS)
            for process in self._processes.values():
                process.log.rotate()
