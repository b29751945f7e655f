"""Reads the CPU time and memory of a process and all its descendants from the operating system."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil


def cpu_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the CPU time of each root and its descendants in seconds, including descendants that have ended."""
    return {name: sum(map(_cpu, _tree(pid))) for name, pid in roots.items()}


def others_cpu_seconds() -> float:
    """Return the CPU time in seconds that the machine used, except for this process and its descendants."""
    return machine_cpu_seconds() - cpu_seconds({"ours": os.getpid()})["ours"]


def machine_cpu_seconds() -> float:
    """Return the CPU time in seconds that all processes on the machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def whole_mib(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the memory of each root and its descendants in MiB, including shared memory."""
    return {name: sum(map(_resident, _tree(pid))) / 2**20 for name, pid in roots.items()}


def resident_mib(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the memory of each root and its descendants in MiB, excluding memory shared with other processes."""
    return {name: sum(map(_unique, _tree(pid))) / 2**20 for name, pid in roots.items()}


def proportional_mib(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the memory of each root and its descendants in MiB. Processes divide shared pages among them."""
    return {name: sum(map(_proportional, _tree(pid))) / 2**20 for name, pid in roots.items()}


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # Its parent process has counted it by now.
    return float(times.user + times.system + times.children_user + times.children_system)


def _unique(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0.0


def _proportional(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0.0


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0.0
