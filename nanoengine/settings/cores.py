"""How many cores the system lets this process use: its affinity, and its control groups' quotas.

torch follows the affinity alone. In a container that gets 4 of 64 cores (`docker --cpus=4`) it
starts 64 threads: together they soon use up the quota, and all wait until it is given anew.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`), scheduler/sched-bwc.rst (v1).
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}
"""Variables with which OpenMP binds threads to cores."""

ROOT = Path("/")
"""Where /proc, /sys and the mounts of control groups are."""


def allowed_cores(root: Path = ROOT) -> int:
    """Cores that this process may use; a quota of 1.5 cores is 2."""
    return max(1, math.ceil(min(affinity(), cpu_quota(root))))


def affinity() -> int:
    """Cores that this process may run on."""
    # Why not with binding: OpenMP has left this thread with one core of them.
    if hasattr(os, "sched_getaffinity") and not BINDING & os.environ.keys():
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual_threads(root: Path = ROOT) -> set[int]:
    """How many threads torch may take by itself: a core each, or with MKL a physical core each."""
    cpus = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return {affinity(), os.cpu_count() or 1, len({path.read_text() for path in cpus})}


def cpu_quota(root: Path = ROOT) -> float:
    """Cores' worth of time that the control groups of this process get: the least of them."""
    return min((_quota_of(folder) for folder in _folders(root)), default=math.inf)


def _folders(root: Path) -> Iterator[Path]:
    """This process's control groups for the CPU, of version 1 and 2, each with those above it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return
    paths: dict[str, str] = {}
    for group in groups:
        _, controllers, path = group.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 names none
    for mount in mounts:
        place, _, system = mount.partition(" - ")
        kind, _, options = system.split(" ", 2)
        name = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if name not in paths or (name and name not in options.split(",")):
            continue
        top, point = (
            re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), word)
            for word in place.split(" ")[3:5]
        )
        own = PurePosixPath(paths[name])
        # Why else the top: what is mounted of a container is often its own group alone.
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        for below in (inside, *inside.parents):
            yield root / point.lstrip("/") / below


def _quota_of(folder: Path) -> float:
    """Cores' worth of time of one control group; warns of a limit that it can't read."""
    names = (
        ("cpu.max",) if (folder / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    try:
        words = " ".join((folder / name).read_text() for name in names).split()
    except FileNotFoundError:  # the root of version 2 has none
        return math.inf
    if words[:1] in (["max"], ["-1"]):
        return math.inf
    try:
        quota, period = map(int, words)
        return quota / period
    except (ValueError, ZeroDivisionError):
        text = f"{folder / names[0]}: {' '.join(words)!r} is no quota; all cores are used"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return math.inf
