"""The number of cores that this process may use, by its affinity and its cgroups' quotas.

torch only considers the affinity. In a container with 4 of 64 cores (`docker --cpus=4`) it starts
64 threads: they quickly use up the quota, and all wait until the next period.

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
"""Variables that make OpenMP bind threads to cores."""

ROOT = Path("/")
"""The root of /proc, /sys and the mounts of cgroups."""


def allowed_cores(root: Path = ROOT) -> int:
    """Number of cores that this process may use; a quota of 1.5 cores is 2."""
    return max(1, math.ceil(min(affinity(), cpu_quota(root))))


def affinity() -> int:
    """Number of cores in the affinity of this process."""
    # Why not with binding: OpenMP has restricted this thread to one core.
    if hasattr(os, "sched_getaffinity") and not BINDING & os.environ.keys():
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual_threads(root: Path = ROOT) -> set[int]:
    """Thread counts that torch may choose itself: one per core, or with MKL per physical core."""
    cpus = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return {affinity(), os.cpu_count() or 1, len({path.read_text() for path in cpus})}


def cpu_quota(root: Path = ROOT) -> float:
    """The smallest CPU quota of this process's cgroups, in cores."""
    return min((_quota_of(folder) for folder in _folders(root)), default=math.inf)


def _folders(root: Path) -> Iterator[Path]:
    """This process's cgroups for the CPU, of versions 1 and 2, each with its ancestors."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return
    paths: dict[str, str] = {}
    for group in groups:
        _, controllers, path = group.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 has no names
    for mount in mounts:
        paths_of_mount, _, system = mount.partition(" - ")
        kind, _, options = system.split(" ", 2)
        name = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if name not in paths or (name and name not in options.split(",")):
            continue
        top, point = (
            re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), word)
            for word in paths_of_mount.split(" ")[3:5]
        )
        own = PurePosixPath(paths[name])
        # Why else the top: a container often mounts only its own cgroup.
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        for below in (inside, *inside.parents):
            yield root / point.lstrip("/") / below


def _quota_of(folder: Path) -> float:
    """The CPU quota of one cgroup in cores; warns of a limit that it can't parse."""
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
        text = f"{folder / names[0]}: {' '.join(words)!r} is not a CPU quota; all cores are used"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return math.inf
