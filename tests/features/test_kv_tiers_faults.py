"""Disk faults of a disk tier: tokens are always right, with one warning and no exception."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import DiskTier, HostTier
from nanoengine.core.engine_stats import EngineStats
from nanoengine.core.tiers.disk import DiskCopy
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.features import kv_tiers
from tests.support.disk_files import carry_out, content
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

MIB = 2**-10  # GiB
PROMPTS = random_prompts(4, [40, 50], seed=2)


def engine_on(path, disk_mib: float = 16) -> LLMEngine:
    tiers = [
        HostTier(gib=4 * MIB, policy="load"),
        DiskTier(path, gib=disk_mib * MIB, policy="load"),
    ]
    return make_engine(checkpoint("qwen3"), block_size=8, num_kv_blocks=25, kv_tiers=tiers)


def outputs(engine: LLMEngine) -> list[list[list[int]]]:
    return tokens(run(engine, PROMPTS, greedy(8)))


def stats_of(path, truth, times: int = 1, **options) -> EngineStats:
    """Runs an engine on this directory, checks its tokens, and returns its counters after close."""
    engine = engine_on(path, **options)
    for _ in range(times):
        assert outputs(engine) == truth
    engine.close()
    return engine.stats()


@pytest.fixture(scope="module")
def truth():
    return outputs(make_engine(checkpoint("qwen3"), enable_prefix_caching=False))


@pytest.fixture
def warm(tmp_path, truth) -> Path:
    """Returns a directory that an engine has filled."""
    stats_of(tmp_path, truth)
    assert len(files(tmp_path)) == 24
    return tmp_path


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.kv"))


def header(path: Path) -> str:
    """Returns the header of a file as text."""
    return path.read_bytes()[:400].decode("ascii", "replace")


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == kv_tiers.__name__]


TOKEN_IDS = {
    "no tokens": b"[]",
    "words": b'["a"]',
    "large numbers": b"[18446744073709551616]",
    "brackets": b"[" * 100_000,
}
# --- other weights --------------------------------------------------------------------------------


def through_an_index(directory: Path, file: str) -> None:
    """Writes a checkpoint index that names this file for all tensors."""
    weight_map = dict.fromkeys(load_file(directory / file), file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def other_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the same tensors with other values in the last layer."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".layers.1." in name and "norm" not in name:
            tensors[name] = -tensor
    return tensors


@pytest.mark.parametrize("how", ["index", "subdirectory", "middle"])
def test_blocks_of_other_weights_are_never_served(how, tmp_path):
    directory, cache = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(checkpoint("qwen3"), directory)
    weights = directory / "model.safetensors"
    if how != "middle":
        (directory / "shards").mkdir()
        weights = weights.rename(directory / ("shards/a" if how == "subdirectory" else "a"))
        through_an_index(directory, str(weights.relative_to(directory)))
    tiers = [HostTier(gib=4 * MIB, policy="load"), DiskTier(cache, gib=16 * MIB, policy="load")]

    def answers(**options) -> list[list[list[int]]]:
        engine = make_engine(str(directory), block_size=8, num_kv_blocks=25, **options)
        found = outputs(engine)
        engine.close()
        return found

    old = answers(kv_tiers=tiers)
    changed, stat = other_weights(weights), weights.stat()
    if how == "index":
        save_file(changed, directory / "b", metadata={"format": "pt"})
        through_an_index(directory, "b")
    elif how == "subdirectory":
        save_file(changed, weights, metadata={"format": "pt"})
    else:  # same size and timestamp, same start and end
        before = weights.read_bytes()
        save_file(changed, weights, metadata={"format": "pt"})
        after = weights.read_bytes()
        edge = 2**16
        assert len(after) == len(before) > 3 * edge
        weights.write_bytes(before[:edge] + after[edge:-edge] + before[-edge:])
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = answers(enable_prefix_caching=False)
    assert new != old
    assert answers(kv_tiers=tiers) == new


# --- damage ---------------------------------------------------------------------------------------

DAMAGES = ["bytes", "header", "checksum", "torn", "empty", "longer", *TOKEN_IDS]


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_removed(what, warm, truth, caplog):
    for path in files(warm):
        data = bytearray(path.read_bytes())
        if what == "bytes":
            data[-100] ^= 1
        elif what == "header":
            data[60] ^= 1
        elif what == "checksum":
            data[-16384 - 3] ^= 1
        elif what == "torn":
            del data[-5000:]
        elif what == "empty":
            data.clear()
        elif what in TOKEN_IDS:
            (length,) = struct.unpack("<I", data[8:12])
            text = re.sub(
                rb'"token_ids":.*?]', b'"token_ids":' + TOKEN_IDS[what], data[12:][:length]
            )
            data[8 : 12 + length] = struct.pack("<I", len(text)) + text
        else:
            data += b"x"
        path.write_bytes(data)
    stats = stats_of(warm, truth)
    assert stats.cache_hit_tokens == stats.tiers[1].loaded_blocks == 0
    assert len(warnings(caplog)) == 1 and "damaged" in warnings(caplog)[0]
    disk = stats_of(warm, truth).tiers[1]
    assert disk.loaded_blocks > 0, "good files replaced the damaged ones"
    assert disk.failed_copies == 0


def make_obstacle(path: Path, what: str) -> None:
    """Creates something that is not a regular file at `path`."""
    if what == "directory":
        path.mkdir()
        (path / "inside").write_text("x")
    elif what == "dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif what == "link":
        path.with_name("target").write_text("mine")
        path.symlink_to(path.with_name("target"))
    elif what == "loop":
        path.symlink_to(path.name)
    else:
        os.mkfifo(path)


THINGS = ["directory", "dangling link", "link", "loop", "FIFO"]
MISSES = [*THINGS, "another byte"]


@pytest.mark.parametrize("what", THINGS)
def test_a_path_that_is_not_a_regular_file_counts_as_one_damaged_file(what, warm, truth, caplog):
    """The scan reports it and still finds all other files."""
    others = files(warm)
    (directory,) = warm.iterdir()
    make_obstacle(directory / "!first.kv", what)
    assert stats_of(warm, truth).tiers[1].cached_blocks == len(others)
    assert "damaged files (first: !first.kv)" in warnings(caplog)[0]
    assert os.path.lexists(directory / "!first.kv") == (what == "directory")
    if what == "link":
        assert (directory / "target").read_text() == "mine"


@pytest.mark.parametrize("what", MISSES)
def test_a_file_damaged_after_the_scan_is_a_miss_when_it_is_read(what, warm, truth):
    engine = engine_on(warm)
    (path,) = [p for p in files(warm) if str(PROMPTS[0][8:16]).replace(" ", "") in header(p)]
    if what == "another byte":
        data = bytearray(path.read_bytes())
        data[-1] ^= 0x80
        path.write_bytes(data)
    else:
        path.unlink()
        make_obstacle(path, what)
    assert outputs(engine) == truth
    failed = engine.stats().tiers[1].failed_copies
    assert failed == 1 or (failed > 1 and what == "directory"), "a directory can't be removed"
    assert engine.stats().tiers[1].loaded_blocks > 0
    engine.close()


@pytest.mark.parametrize("what", THINGS)
def test_no_block_is_written_through_an_existing_path(what, tmp_path, caplog):
    host = np.arange(3000, dtype=np.uint8).reshape(3, 1000) % 251
    disk = kv_tiers.DiskFiles(tmp_path, "f", host)
    digest = content(1).prefix.digest.hex()
    make_obstacle(disk.directory / f"0-{digest}.tmp", what)
    assert carry_out(disk, DiskCopy("write", content(1), 1, 1)) == [False]
    assert not os.path.exists(disk.directory / "nowhere")
    if what == "link":
        assert (disk.directory / "target").read_text() == "mine"
    assert disk.can_write, "damage of one file"
    assert carry_out(disk, DiskCopy("write", content(2), 2, 1)) == [True]
    if what != "directory":
        assert carry_out(disk, DiskCopy("write", content(1), 1, 1)) == [True]
    disk.close()


def test_a_header_with_a_wrong_group_or_a_huge_length_is_damage(warm, truth, caplog):
    parents = "".join(map(header, files(warm)))
    leaves = [p for p in files(warm) if f'"parent":"{p.stem.partition("-")[2]}"' not in parents]
    first, second = leaves[:2]
    data = first.read_bytes()
    (length,) = struct.unpack("<I", data[8:12])
    text = data[12:][:length].replace(b'"group":0', b'"group":7')
    first.write_bytes(data[:12] + text + data[12 + length :])
    with open(second, "r+b") as file:  # sparse
        file.seek(8)
        file.write(struct.pack("<I", 2**32 - 1))
        file.truncate(12 + 2**32 - 1 + 16 + 16384)
    engine = engine_on(warm)
    assert engine.stats().tiers[1].cached_blocks == 24 - 2
    engine.close()
    (warning,) = warnings(caplog)
    assert f"damaged files (first: {second.name})" in warning


def test_only_this_user_has_access_to_the_directory(tmp_path):
    old = os.umask(0)
    try:
        engine = engine_on(tmp_path / "below" / "kv")
        outputs(engine)
        engine.close()
    finally:
        os.umask(old)
    (directory,) = (tmp_path / "below" / "kv").iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert len(list(directory.iterdir())) > 20 and modes == {0o600}


@pytest.mark.parametrize("below", ["", "kv"])
def test_a_tier_path_that_is_a_file_raises(tmp_path, below):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(ConfigError, match="must be a directory"):
        kv_tiers.DiskFiles(tmp_path / "f" / below, "model", np.zeros((2, 8), np.uint8))


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path, caplog):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "lock").symlink_to(tmp_path / "made")
    disk = kv_tiers.DiskFiles(tmp_path, "f", np.zeros((2, 8), np.uint8))
    assert not disk.can_write and not (tmp_path / "made").exists()
    assert "only read" in warnings(caplog)[0]
    disk.close()


def test_a_dropped_engine_releases_the_lock(warm, truth, caplog):
    first = engine_on(warm)
    assert outputs(first) == truth
    del first
    second = engine_on(warm)
    assert warnings(caplog) == []
    second.close()


@pytest.mark.parametrize("where", ["features.kv_tiers.TieredPrefixCache", "build.Scheduler"])
def test_an_engine_that_failed_at_start_releases_the_lock(where, warm, caplog, monkeypatch):
    module, _, name = where.rpartition(".")
    module = importlib.import_module(f"nanoengine.{module}")

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(ZeroDivisionError) as kept:
            engine_on(warm)
    second = engine_on(warm)
    assert warnings(caplog) == []
    assert kept.value.__traceback__ is not None, "as a notebook keeps it"
    second.close()


def test_a_file_under_another_name_or_model_is_not_used(warm, truth):
    first, second = files(warm)[:2]
    shutil.copy(first, second)  # complete, with a valid checksum, but under another name
    other = warm / "0123456789abcdef"
    other.mkdir()
    shutil.copy(first, other / first.name)
    stats_of(warm, truth)
    assert (other / first.name).exists(), "other models' files are left alone"


class FullDisk:
    """Replaces `open`: after some bytes, writing fails as on a full disk."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, path, mode="r", **options):
        if "x" in mode:
            self.left -= 1
            if self.left < 0:
                Path(path).write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, mode, **options)


def test_a_full_disk_stores_no_more_blocks_and_still_serves_reads(
    tmp_path, truth, caplog, monkeypatch
):
    monkeypatch.setattr(kv_tiers, "open", FullDisk(after=10), raising=False)
    stats_of(tmp_path, truth, times=2)
    assert len(warnings(caplog)) == 1 and "No space left" in warnings(caplog)[0]
    assert len(files(tmp_path)) == 10 and not list(tmp_path.glob("*/*.tmp"))
    assert stats_of(tmp_path, truth).tiers[1].hit_blocks > 0


def test_the_size_limit_evicts_the_oldest_files(tmp_path, truth):
    stats = stats_of(tmp_path, truth, times=2, disk_mib=0.125)  # 8 blocks
    assert stats.tiers[1].stored_blocks > 8
    assert len(files(tmp_path)) == 8
    engine_on(tmp_path, disk_mib=0.0625).close()
    assert len(files(tmp_path)) == 4, "a smaller cap is kept from the start"


def test_a_directory_that_disappears_is_reported_once(warm, truth, caplog):
    engine = engine_on(warm)
    shutil.rmtree(warm)
    assert outputs(engine) == truth
    assert outputs(engine) == truth
    engine.close()
    found = warnings(caplog)
    assert len([warning for warning in found if "lost files" in warning]) == 1
    assert len(found) == len(set(found)) <= 2
    assert engine.stats().tiers[1].loaded_blocks == 0


def test_a_directory_that_cannot_be_created_is_reported_once(tmp_path, truth, caplog, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(kv_tiers.Path, "mkdir", denied)
    assert stats_of(tmp_path / "below", truth).tiers[1].stored_blocks == 0
    assert any("can't be written" in warning for warning in warnings(caplog))


def test_a_read_only_directory_is_read(warm, truth, caplog, monkeypatch):
    def denied(path, flags=os.O_RDWR, *args):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *args)

    opened = os.open
    monkeypatch.setattr(kv_tiers.os, "open", denied)
    monkeypatch.setattr(kv_tiers.os, "utime", denied)
    before = files(warm)
    disk = stats_of(warm, truth, disk_mib=0.125).tiers[1]
    assert disk.loaded_blocks > 0 and disk.stored_blocks == 0
    assert files(warm) == before
    found = warnings(caplog)
    assert len(found) == len(set(found)) and "it is only read" in found[0]


def test_two_processes_share_a_directory_and_one_writes(warm, truth, caplog):
    first = engine_on(warm)
    second = engine_on(warm)
    assert "another process" in warnings(caplog)[0]
    assert outputs(second) == outputs(first) == truth
    assert second.stats().tiers[1].loaded_blocks > 0
    first.close()
    assert outputs(second) == truth
    second.close()
    third = engine_on(warm)
    assert len(warnings(caplog)) == 1, "a closed engine has given the lock back"
    third.close()


CHILD = """
import sys
from tests.features.test_kv_tiers_faults import *
tiers = [HostTier(gib=4 * MIB), DiskTier(sys.argv[2], gib=16 * MIB)]
engine = make_engine(sys.argv[1], block_size=8, num_kv_blocks=25, kv_tiers=tiers)
run(engine, PROMPTS, greedy(8))
print("running", flush=True)
for seed in range(10_000):
    run(engine, random_prompts(4, [40, 50], seed=seed + 100), greedy(8))
"""


def test_a_process_killed_while_it_stores_leaves_a_usable_directory(tmp_path, truth):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, checkpoint("qwen3"), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None and child.stdout.readline() == b"running\n"
    deadline = time.monotonic() + 60
    while len(files(tmp_path)) < 60 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (directory,) = tmp_path.iterdir()
    (directory / "0-half.tmp").write_bytes(b"nanoKV01 torn")  # as an interrupted write leaves it
    disk = stats_of(tmp_path, truth).tiers[1]
    assert not list(directory.glob("*.tmp"))
    assert disk.cached_blocks >= 60
    assert disk.loaded_blocks > 0 and disk.failed_copies == 0
