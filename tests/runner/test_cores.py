"""settings/cores.py: the number of usable cores, which limits the threads of torch and kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoengine.runner.options import THREAD_VARIABLES, use_allowed_cores
from nanoengine.settings import cores

ROOT = Path(__file__).resolve().parents[2]
V2 = "30 20 0:27 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 20 0:29 {top} /sys/fs/cgroup/cpu\\040time rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "32 20 0:30 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
DISK = "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


def system(tmp_path: Path, groups: str, mounts: str, **files: str) -> Path:
    """A root folder with these files in /proc/self and below /sys/fs/cgroup."""
    texts = {"proc/self/cgroup": groups, "proc/self/mountinfo": f"{DISK}\n{mounts}\n"}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("group", "top", "limits", "quota"),
    [
        ("/", "/", {"cpu.max": "400000 100000\n"}, 4),  # as seen inside a container
        ("/", "/", {}, math.inf),
        ("/a/b", "/", {"a/b/cpu.max": "max 100000\n"}, math.inf),
        ("/a/b", "/", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("/a/b", "/", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "300000 100000\n"}, 0.5),
        ("/a/b", "/", {"other/cpu.max": "100000 100000\n"}, math.inf),
        ("/docker/x/y", "/docker/x", {"y/cpu.max": "200000 50000\n"}, 4),
        ("/a", "/docker/x", {"cpu.max": "200000 100000\n"}, 2),  # outside the mounted folder
        ("/../other", "/", {"cpu.max": "200000 100000\n"}, 2),
    ],
)
def test_the_quota_of_cgroup_v2_is_the_minimum_up_to_the_root(tmp_path, group, top, limits, quota):
    root = system(tmp_path, f"0::{group}\n", V2.format(top=top), **limits)
    assert cores.cpu_quota(root) == quota


@pytest.mark.parametrize(
    ("quota", "expected"), [("-1\n", math.inf), ("250000\n", 2.5), ("1000000\n", 10)]
)
def test_the_quota_of_cgroup_v1_comes_from_the_cpu_controller(tmp_path, quota, expected):
    groups = "5:memory:/m\n4:cpu,cpuacct:/a:b/c\n1:name=systemd:/\n0::/\n"
    files = {
        "cpu time/a:b/c/cpu.cfs_quota_us": quota,
        "cpu time/a:b/c/cpu.cfs_period_us": "100000\n",
        "cpu time/cpu.cfs_quota_us": "-1\n",
        "cpu time/cpu.cfs_period_us": "100000\n",
        "memory/a:b/c/cpu.cfs_quota_us": "1000\n",  # of another controller
        "memory/a:b/c/cpu.cfs_period_us": "1000\n",
    }
    mounts = "\n".join(mount.format(top="/") for mount in (V1_MEMORY, V1))
    assert cores.cpu_quota(system(tmp_path, groups, mounts, **files)) == expected


@pytest.mark.parametrize("text", ["", "100000", "much 100000", "100000 0", "1 2 3"])
def test_an_invalid_quota_warns_and_limits_nothing(tmp_path, text):
    root = system(tmp_path, "0::/\n", V2.format(top="/"), **{"cpu.max": text})
    with pytest.warns(RuntimeWarning, match="cpu.max: '.*' is not a CPU quota; all cores are used"):
        assert cores.cpu_quota(root) == math.inf


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cores.cpu_quota(tmp_path) == math.inf
    assert cores.cpu_quota(system(tmp_path, "", DISK)) == math.inf


@pytest.mark.parametrize(
    ("limit", "affinity", "allowed"),
    [
        ("400000 100000", 64, 4),
        ("150000 100000", 64, 2),
        ("1000 100000", 64, 1),
        ("400000 100000", 2, 2),
        ("max 100000", 3, 3),
    ],
)
def test_allowed_cores_are_the_minimum_of_all_limits_and_at_least_one(
    tmp_path, monkeypatch, limit, affinity, allowed
):
    monkeypatch.setattr(cores, "affinity", lambda: affinity)
    root = system(tmp_path, "0::/\n", V2.format(top="/"), **{"cpu.max": limit})
    assert cores.allowed_cores(root) == allowed


@pytest.fixture
def threads(monkeypatch):
    """torch's thread count on a host with 64 logical and 32 physical cores; 4 are allowed."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "allowed_cores", lambda: 4)
    monkeypatch.setattr(cores, "usual_threads", lambda: {64, 32})
    count = [64]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.__setitem__(0, number))
    return count


@pytest.mark.parametrize(("before", "after"), [(64, 4), (32, 4), (8, 8), (3, 3)])
def test_torch_threads_are_limited_unless_the_user_has_set_them(threads, before, after):
    threads[0] = before
    use_allowed_cores()
    assert threads == [after]


@pytest.mark.parametrize("name", sorted(THREAD_VARIABLES))
def test_an_environment_variable_overrides_the_limit(threads, monkeypatch, name):
    monkeypatch.setenv(name, "64")
    use_allowed_cores()
    assert threads == [64]


def test_physical_cores_are_counted_once(tmp_path):
    for cpu, siblings in enumerate(("0,3", "1,4", "2,5", "0,3", "1,4", "2,5")):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings)
    assert 3 in cores.usual_threads(tmp_path)


@pytest.mark.guards(
    "nanoengine/settings/cores.py", "nanoengine/runner/options.py", "nanoengine/kernels/threads.py"
)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has affinities")
@pytest.mark.parametrize("order", ["allow; import torch", "import torch; allow"])
def test_an_engine_uses_the_cores_of_the_affinity_mask(order):
    """Runs in its own process, because torch counts cores once. The affinity is set before or after
    the import of torch."""
    code = (
        f"import os; {order};"
        "from tests.support.engines import checkpoint, make_engine;"
        "make_engine(checkpoint('qwen3'), attention_backend='cpu').close();"
        "from nanoengine.kernels.threads import num_workers;"
        "print(torch.get_num_threads(), num_workers())"
    ).replace("allow", "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")
    env = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "1 1\n", done.stderr
