"""Starts one program for the registry, limits it, and kills all its descendants when it ends.

This module runs in a Python process without site-packages, so it imports only the standard library and `guard`. Its
standard input, output and error belong to the program. The last argument is the file descriptor of a socket to the
registry:

    registry -> sandbox   one line of JSON: an `Order`
    sandbox -> registry   one line of JSON: {} once the program is running, {"problem": "..."} if it cannot start,
                          and a second one if the sandbox killed it for exceeding a limit

When the socket closes for any reason, or the program ends, the sandbox kills all descendants, deletes the program's
home folder, and exits.
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
# Lower capabilities concern files; root may need them to access other users' files.
_FIRST_DROPPED_CAPABILITY: Final = 5
_CAPABILITIES_MAX: Final = 64

# Landlock: system calls, with the same numbers on every architecture, and rights by the version that added them.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_ABI_OF: Final = 1
# Older versions allow truncating a file without write permission.
_ABI_MIN: Final = 3
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
_SCOPES: Final = 0b11  # Abstract sockets and signals to other processes.

# Paths that every program needs.
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
# Other programs' shared memory, such as PostgreSQL's. Readable only if granted explicitly.
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  # no file is created there
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")

MEMORY_BYTES_DEFAULT: Final = 1024**3
PROCESSES_DEFAULT: Final = 64


@dataclass(frozen=True, kw_only=True)
class Order:
    """The program to start, its limits, and the paths that it may access in addition to system files.

    All paths are absolute.
    """

    command: Sequence[str]
    environment: dict[str, str]
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    # Paths that it may never access, even inside a readable folder.
    private: Sequence[str] = ()
    # True if it may read everything that the registry's user can.
    reads_all: bool = False
    # False to run with all rights of the registry's user.
    is_confined: bool = True
    memory_bytes_max: int = MEMORY_BYTES_DEFAULT
    processes_max: int = PROCESSES_DEFAULT
    # Its own folder and working directory; deleted at the end.
    home: str = ""
    # The seccomp filter of a confined program, in hex.
    syscall_filter: str = ""


class StartProblem(Exception):
    """Raised when the program cannot be started with the requested limits. The message is human-readable."""


def main() -> None:
    """Start the requested program, and wait until it ends or the registry closes the socket."""
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
    """Close the sandbox's ends of the program's pipes, so that each side notices when the other side closes."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _start(order: Order, guard: Guard) -> None:
    """Fork the program, and return once it is running."""
    rules = _ruleset(order)
    read, write = os.pipe()
    child = guard.fork()
    if child == 0:
        try:
            os.close(read)
            _limit(order)
            # Otherwise, programs run by root could inspect the registry despite Landlock.
            for capability in range(_FIRST_DROPPED_CAPABILITY, _CAPABILITIES_MAX):
                prctl(_CAPBSET_DROP, capability)
            os.chdir(order.home)
            if rules is not None:
                _confine(rules, bytes.fromhex(order.syscall_filter))
            os.execvpe(order.command[0], list(order.command), order.environment)  # noqa: S606  # no shell is wanted
        except BaseException as error:  # noqa: BLE001  # any error must be reported to the parent process
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
        # Limits only writable memory, because programs like node reserve far more address space than they use.
        memory = order.memory_bytes_max
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        # The kernel counts all of the user's threads, so this only limits growth between two checks.
        threads_now = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        threads_max = threads_now + 16 * order.processes_max
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        threads = threads_max if hard == resource.RLIM_INFINITY else min(threads_max, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def _broken_limit(order: Order) -> str:
    if not IS_LINUX:
        return ""
    found = descendants()
    if len(found) > order.processes_max:
        return f"it had more than {order.processes_max} processes and was killed"
    page = resource.getpagesize()
    used = 0
    for process in found:
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared = Path(f"/proc/{process}/statm").read_bytes().split()[:3]
            used += (int(resident) - int(shared)) * page
    if used > order.memory_bytes_max:
        return f"it used more than {order.memory_bytes_max} bytes of memory and was killed"
    return ""


def _landlock(number: int, *arguments: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    return result


def _landlock_abi() -> int:
    if not IS_LINUX:
        return 0
    return max(_landlock(_CREATE_RULESET, ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(_ABI_OF)), 0)


def _ruleset(order: Order) -> int | None:
    """Return the Landlock rules as a file descriptor, or None for an unconfined program.

    Raises:
        StartProblem: This machine cannot confine the program, or a folder must not be granted.
    """
    if not order.is_confined:
        return None
    abi = _landlock_abi()
    if abi < _ABI_MIN:
        raise StartProblem(
            "cannot restrict its file access: this requires Linux 6.2 or newer with Landlock;"
            " set PAWL_MCP_UNCONFINED=true on the registry to run it unconfined"
        )
    handled = _RIGHTS_OF_ABI_5 if abi >= 5 else _RIGHTS  # noqa: PLR2004  # the version that added the last right
    # Older kernels accept the whole structure if the fields they do not know are zero.
    attributes = struct.pack("=QQQ", handled, 0, _SCOPES if abi >= _SCOPE_ABI else 0)
    size, no_flags = ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    rules = _landlock(_CREATE_RULESET, ctypes.c_char_p(attributes), size, no_flags)
    if rules < 0:
        raise StartProblem("cannot restrict its file access: Landlock failed")
    program = shutil.which(order.command[0], path=order.environment.get("PATH"))
    private = [os.path.realpath(path) for path in order.private]
    excluded = [*private, os.path.realpath(_SHARED_MEMORY)]
    for path in ("/",) if order.reads_all else (*_SYSTEM_PATHS, *filter(None, [program])):
        _allow_except(rules, path, _READ & handled, excluded)
    for path in order.readable:
        _refuse_inside(path, private)
        _allow_except(rules, path, _READ & handled, private, must_exist=True)
    for path in order.writable:
        _refuse_inside(path, private)
        for hidden in private:
            if _is_inside(hidden, os.path.realpath(path)):
                raise StartProblem(f"{path!r} cannot be writable, because it contains the private path {hidden!r}")
        _allow(rules, path, handled, must_exist=True)
    _allow(rules, order.home, handled, must_exist=True)
    for path in _DEVICES:
        _allow(rules, path, (_READ | _WRITE_FILE | _IOCTL_DEV) & handled, must_exist=False)
    return rules


def _is_inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or is inside it. Both paths must be resolved."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _refuse_inside(path: str, private: Sequence[str]) -> None:
    if any(_is_inside(os.path.realpath(path), hidden) for hidden in private):
        raise StartProblem(f"{path!r} is private to Pawl; no program may access it")


def _allow_except(rules: int, path: str, rights: int, private: Sequence[str], *, must_exist: bool = False) -> None:
    """Allow access to a file or folder, except for private paths. For a folder, this covers its current contents.

    Landlock does not support exceptions. In a folder that contains a private path, all other entries are therefore
    allowed individually, and the folder itself can only be listed.
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
            # A link's target is handled at its own path.
            if not entry.is_symlink():
                _allow_except(rules, entry.path, rights, private)


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
            raise StartProblem(f"cannot allow access to {path!r}")
    finally:
        os.close(descriptor)


def _confine(rules: int, instructions: bytes) -> None:
    """Apply the rules and the system call filter to this process and its descendants."""
    prctl(_SET_NO_NEW_PRIVS, 1)
    if _landlock(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0)) < 0:
        raise StartProblem("cannot restrict its file access: Landlock failed")
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(code)))
    if not instructions or ctypes.CDLL(None).prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, 0, 0) != 0:
        raise StartProblem("cannot restrict its sockets: this machine does not support seccomp filters")
