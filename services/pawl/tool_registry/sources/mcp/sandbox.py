"""Starts one program for the registry, limits it, and kills everything that it started at the end.

It runs in a Python without site-packages, so it imports nothing beside the standard library and `guard`. Standard
input, output and error belong to the program. The last argument is the file descriptor of a socket to the registry:

    registry -> sandbox   one line of JSON: an `Order`
    sandbox -> registry   one line of JSON: {} once the program runs, {"problem": "..."} if it cannot start,
                          and a second one if the sandbox ended it for breaking a limit

When the socket closes, for whatever reason, or the program ends, the sandbox kills everything that the program has
started, deletes its folder, and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from pawl.tool_registry.sources.python.guard import IS_LINUX, Guard, descendants, prctl

_TICK_SECONDS: Final = 0.25
_GRACE_SECONDS: Final = 1.0
_ORDER_BYTES_MAX: Final = 8 * 1024 * 1024

# prctl
_SET_NO_NEW_PRIVS: Final = 38
_SET_SECCOMP: Final = 22
_FILTER: Final = 2
_CAPBSET_DROP: Final = 24
# Those below are about files, where the superuser may need them for what belongs to others.
_FIRST_DROPPED_CAPABILITY: Final = 5
_CAPABILITIES_MAX: Final = 64

# Landlock: system calls, which have these numbers on every architecture, and rights by the version that brought them.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_ABI_OF: Final = 1
_ABI_MIN: Final = 3
"""Before it, a file can be truncated without the right to write."""
_PATH_BENEATH: Final = 1
_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_RIGHTS: Final = (1 << 15) - 1
_RIGHTS_OF_ABI_5: Final = (1 << 16) - 1
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES: Final = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABI: Final = 6
_SCOPES: Final = 0b11  # abstract sockets and signals of others

# What programs of the system need to run at all.
_SYSTEM_PATHS: Final = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/ssl",
    "/etc/timezone",
    "/proc",
    "/run/systemd/resolve",
    "/sys/devices/system/cpu",
    "/sys/fs/cgroup",
)
# Of other programs: rows of PostgreSQL, for example. Read by who was given it.
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  # nothing is made there
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")

MEMORY_BYTES_DEFAULT: Final = 1024**3
PROCESSES_DEFAULT: Final = 64


@dataclass(frozen=True, kw_only=True)
class Order:
    """The program to start, its limits, and what it may reach beside the system's files. Paths are absolute."""

    command: Sequence[str]
    environment: dict[str, str]
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    private: Sequence[str] = ()
    """Paths that it never reaches, not even inside a folder that it may read."""
    reads_all: bool = False
    """True if it may read whatever the registry's user may."""
    is_confined: bool = True
    """False for the rights of the registry's user."""
    memory_bytes_max: int = MEMORY_BYTES_DEFAULT
    processes_max: int = PROCESSES_DEFAULT
    home: str = ""
    """A folder of its own, its working directory; deleted at the end."""
    syscall_filter: str = ""
    """The seccomp program of a confined one, in hex."""


class StartProblem(Exception):
    """The program cannot be started as ordered; the message is for people."""


def main() -> None:
    """Start what is ordered, and stay until it, or the registry, is gone."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    with control.makefile("rb") as messages:
        order = Order(**json.loads(messages.readline(_ORDER_BYTES_MAX)))
    guard = Guard()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    problem = ""
    try:
        _start(order, guard)
        _report(control, "")
        _release_pipes()
        problem = guard.watch(control, check=partial(_broken_limit, order), tick_seconds=_TICK_SECONDS)
    except (StartProblem, OSError, ValueError) as error:
        problem = str(error)
    finally:
        if problem:
            _report(control, problem)
        guard.end(grace_seconds=0.0 if problem else _GRACE_SECONDS)
        shutil.rmtree(order.home, ignore_errors=True)


def _report(control: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps({"problem": problem} if problem else {}).encode() + b"\n")


def _release_pipes() -> None:
    """Close the sandbox's own ends of the program's pipes, so that each side sees the other go."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _start(order: Order, guard: Guard) -> None:
    """Fork the program and return once it runs."""
    rules = _ruleset(order)
    read, write = os.pipe()
    child = guard.fork()
    if child == 0:
        try:
            os.close(read)
            _limit(order)
            # Else the superuser's programs could look into the registry in spite of Landlock.
            for capability in range(_FIRST_DROPPED_CAPABILITY, _CAPABILITIES_MAX):
                prctl(_CAPBSET_DROP, capability)
            os.chdir(order.home)
            if rules is not None:
                _confine(rules, bytes.fromhex(order.syscall_filter))
            os.execvpe(order.command[0], list(order.command), order.environment)  # noqa: S606  # no shell is wanted
        except BaseException as error:  # noqa: BLE001  # whatever it is, the other side of the fork must hear it
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            os.write(write, f"cannot start {order.command[0]!r}: {text}".encode()[:1000])
        finally:
            os._exit(127)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        problem = pipe.read().decode(errors="replace")
    if rules is not None:
        os.close(rules)
    if problem:
        os.waitpid(child, 0)
        raise StartProblem(problem)


def _limit(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if IS_LINUX:
        # Of writable memory: programs like node reserve far more addresses than they use.
        memory = order.memory_bytes_max
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        # The kernel counts all threads of the user, so this only bounds what happens between two checks of the limits.
        threads_now = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        threads_max = threads_now + 16 * order.processes_max
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        threads = threads_max if hard == resource.RLIM_INFINITY else min(threads_max, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def _broken_limit(order: Order) -> str:
    """Return which limit the program has broken together with all that it started, or an empty text."""
    if not IS_LINUX:
        return ""
    found = descendants()
    if len(found) > order.processes_max:
        return f"it had more than {order.processes_max} processes and was ended"
    page = resource.getpagesize()
    used = 0
    for process in found:
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared = Path(f"/proc/{process}/statm").read_bytes().split()[:3]
            used += (int(resident) - int(shared)) * page
    if used > order.memory_bytes_max:
        return f"it used more than {order.memory_bytes_max} bytes of memory and was ended"
    return ""


def _landlock(number: int, *arguments: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    return result


def _landlock_abi() -> int:
    """Return the version of Landlock in this kernel; 0 if there is none."""
    if not IS_LINUX:
        return 0
    return max(_landlock(_CREATE_RULESET, ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(_ABI_OF)), 0)


def _ruleset(order: Order) -> int | None:
    """Return the rules for the program as a file descriptor; None for a program that is not confined.

    Raises:
        StartProblem: this machine cannot confine it, or a folder may not be granted.
    """
    if not order.is_confined:
        return None
    abi = _landlock_abi()
    if abi < _ABI_MIN:
        raise StartProblem(
            "its access to files cannot be limited: this needs Linux 6.2 or newer, with Landlock;"
            " PAWL_MCP_UNCONFINED=true of the registry does without"
        )
    handled = _RIGHTS_OF_ABI_5 if abi >= 5 else _RIGHTS  # noqa: PLR2004  # the version that brought the last right
    # Older kernels take the whole structure too, if what they do not know is zero.
    attributes = struct.pack("=QQQ", handled, 0, _SCOPES if abi >= _SCOPE_ABI else 0)
    size, no_flags = ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    rules = _landlock(_CREATE_RULESET, ctypes.c_char_p(attributes), size, no_flags)
    if rules < 0:
        raise StartProblem("its access to files cannot be limited: Landlock refuses")
    program = shutil.which(order.command[0], path=order.environment.get("PATH"))
    private = [os.path.realpath(path) for path in order.private]
    unasked = [*private, os.path.realpath(_SHARED_MEMORY)]
    for path in ("/",) if order.reads_all else (*_SYSTEM_PATHS, *filter(None, [program])):
        _allow_but(rules, path, _READ & handled, unasked)
    for path in order.readable:
        _refuse_inside(path, private)
        _allow_but(rules, path, _READ & handled, private, must_exist=True)
    for path in order.writable:
        _refuse_inside(path, private)
        for hidden in private:
            if _is_inside(hidden, os.path.realpath(path)):
                raise StartProblem(f"{path!r} cannot be writable, because the private {hidden!r} is in it")
        _allow(rules, path, handled, must_exist=True)
    _allow(rules, order.home, handled, must_exist=True)
    for path in _DEVICES:
        _allow(rules, path, (_READ | _WRITE_FILE | _IOCTL_DEV) & handled, must_exist=False)
    return rules


def _is_inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or lies in it; both without links."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _refuse_inside(path: str, private: Sequence[str]) -> None:
    """Refuse, with a StartProblem, to grant what lies in a private place."""
    if any(_is_inside(os.path.realpath(path), hidden) for hidden in private):
        raise StartProblem(f"{path!r} is private to Pawl: no program may reach it")


def _allow_but(rules: int, path: str, rights: int, private: Sequence[str], *, must_exist: bool = False) -> None:
    """Allow to read a file, or a folder and all that is in it now, without what is private.

    Landlock knows no exceptions. So of a folder with something private in it
    each other entry is allowed by itself, and of the rest only the names.
    """
    real = os.path.realpath(path)
    if any(_is_inside(real, hidden) for hidden in private):
        return
    if not any(_is_inside(hidden, real) for hidden in private):
        _allow(rules, real, rights, must_exist=must_exist)
        return
    _allow(rules, real, _READ_DIR, must_exist=must_exist)
    with contextlib.suppress(OSError), os.scandir(real) as entries:
        for entry in entries:
            # Where a link leads is allowed where that is.
            if not entry.is_symlink():
                _allow_but(rules, entry.path, rights, private)


def _allow(rules: int, path: str, rights: int, *, must_exist: bool) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if must_exist:
            raise StartProblem(f"{path!r} cannot be opened: {error.strerror}") from None
        return
    try:
        if not Path(path).is_dir():
            rights &= _ON_FILES
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, descriptor))
        if _landlock(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)) < 0:
            raise StartProblem(f"access to {path!r} cannot be allowed")
    finally:
        os.close(descriptor)


def _confine(rules: int, instructions: bytes) -> None:
    """Keep this process, and everything that it starts, to the rules and to the filter of system calls."""
    prctl(_SET_NO_NEW_PRIVS, 1)
    if _landlock(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0)) < 0:
        raise StartProblem("its access to files cannot be limited: Landlock refuses")
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(code)))
    if not instructions or ctypes.CDLL(None).prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, 0, 0) != 0:
        raise StartProblem("its sockets cannot be limited: this machine has no filter of system calls (seccomp)")
