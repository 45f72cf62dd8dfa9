"""What a disk can do to a disk tier: right tokens every time, one warning, and no exception."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanoengine import DiskTier, HostTier
from nanoengine.core.disk_tier import DiskCopy
from nanoengine.engine import LLMEngine
from nanoengine.features import kv_tiers
from tests.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.test_kv_tiers import carry_out, content

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


@pytest.fixture(scope="module")
def truth():
    return outputs(make_engine(checkpoint("qwen3"), enable_prefix_caching=False))


@pytest.fixture
def warm(tmp_path, truth) -> Path:
    """A directory that an engine has filled."""
    engine = engine_on(tmp_path)
    assert outputs(engine) == truth
    engine.close()
    assert len(files(tmp_path)) == 24
    return tmp_path


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.kv"))


def header(path: Path) -> str:
    """The start of a file, as text."""
    return path.read_bytes()[:400].decode("ascii", "replace")


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == kv_tiers.__name__]


TOKEN_IDS = {"no tokens": b"[]", "words": b'["a"]', "large numbers": b"[18446744073709551616]"}
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
    engine = engine_on(warm)
    assert outputs(engine) == truth
    assert engine.stats().cache_hit_tokens == 0
    assert engine.stats().tiers[1].loaded_blocks == 0
    assert len(warnings(caplog)) == 1 and "damaged" in warnings(caplog)[0]
    engine.close()
    again = engine_on(warm)
    assert outputs(again) == truth
    assert again.stats().tiers[1].loaded_blocks > 0, "good files took the place of the damaged"
    assert again.stats().tiers[1].failed_copies == 0
    again.close()


def test_a_block_damaged_while_the_engine_runs_costs_one_miss(warm, truth):
    engine = engine_on(warm)
    (path,) = [p for p in files(warm) if str(PROMPTS[0][8:16]).replace(" ", "") in header(p)]
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)
    assert outputs(engine) == truth
    assert engine.stats().tiers[1].failed_copies == 1
    assert engine.stats().tiers[1].loaded_blocks > 0
    engine.close()


def test_a_file_of_another_name_or_model_is_not_believed(warm, truth):
    first, second = files(warm)[:2]
    shutil.copy(first, second)  # whole, with a right checksum, and not what its name says
    other = warm / "0123456789abcdef"
    other.mkdir()
    shutil.copy(first, other / first.name)
    engine = engine_on(warm)
    assert outputs(engine) == truth
    engine.close()
    assert (other / first.name).exists(), "other models' files are left alone"


class FullDisk:
    """Stands in for `open`: writing fails as on a full disk, after some bytes."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, path, mode="r"):
        if "w" in mode:
            self.left -= 1
            if self.left < 0:
                Path(path).write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, mode)


def test_a_full_disk_takes_no_more_and_still_gives(tmp_path, truth, caplog, monkeypatch):
    monkeypatch.setattr(kv_tiers, "open", FullDisk(after=10), raising=False)
    engine = engine_on(tmp_path)
    assert outputs(engine) == truth
    assert outputs(engine) == truth
    engine.close()
    assert len(warnings(caplog)) == 1 and "No space left" in warnings(caplog)[0]
    assert len(files(tmp_path)) == 10 and not list(tmp_path.glob("*/*.tmp"))
    caplog.clear()
    again = engine_on(tmp_path)
    assert again.stats().tiers[1].cached_blocks == 10
    assert outputs(again) == truth
    again.close()


def test_a_cap_is_kept_by_evicting_the_oldest(tmp_path, truth):
    engine = engine_on(tmp_path, disk_mib=0.125)  # 8 blocks
    assert outputs(engine) == truth
    assert outputs(engine) == truth
    engine.close()
    assert engine.stats().tiers[1].stored_blocks > 8
    assert len(files(tmp_path)) == 8
    smaller = engine_on(tmp_path, disk_mib=0.0625)
    smaller.close()
    assert len(files(tmp_path)) == 4, "a smaller cap is kept from the start"


def test_a_directory_that_disappears_is_reported_once(warm, truth, caplog):
    engine = engine_on(warm)
    shutil.rmtree(warm)
    assert outputs(engine) == truth
    assert outputs(engine) == truth
    engine.close()
    told = warnings(caplog)
    assert len([t for t in told if "lost files" in t]) == 1
    assert len(told) == len(set(told)) <= 2
    assert engine.stats().tiers[1].loaded_blocks == 0


def test_a_path_that_cannot_be_made_is_reported_once(tmp_path, truth, caplog):
    (tmp_path / "file").write_text("in the way")
    engine = engine_on(tmp_path / "file" / "below")
    assert outputs(engine) == truth
    engine.close()
    assert any("can't be written" in told for told in warnings(caplog))
    assert engine.stats().tiers[1].stored_blocks == 0


def test_a_read_only_directory_is_read(warm, truth, caplog, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(kv_tiers.os, "open", denied)
    monkeypatch.setattr(kv_tiers.os, "utime", denied)
    before = files(warm)
    engine = engine_on(warm, disk_mib=0.125)
    assert outputs(engine) == truth
    assert engine.stats().tiers[1].loaded_blocks > 0
    assert engine.stats().tiers[1].stored_blocks == 0
    engine.close()
    assert files(warm) == before
    told = warnings(caplog)
    assert len(told) == len(set(told)) and "it is only read" in told[0]


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


def test_a_worker_that_meets_a_bad_file_leaves_the_host_block_unindexed(tmp_path):
    host = np.arange(3000, dtype=np.uint8).reshape(3, 1000) % 251
    disk = kv_tiers.DiskFiles(tmp_path, "f", host)
    assert carry_out(disk, DiskCopy("write", content(1), 1, 1)) == [True]
    (path,) = files(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert carry_out(disk, DiskCopy("read", content(1), 2, 1)) == [False]
    assert not path.exists()
    disk.close()


CHILD = """
import sys
from tests.test_kv_tiers_faults import *
tiers = [HostTier(gib=4 * MIB), DiskTier(sys.argv[2], gib=16 * MIB)]
engine = make_engine(sys.argv[1], block_size=8, num_kv_blocks=25, kv_tiers=tiers)
run(engine, PROMPTS, greedy(8))
print("running", flush=True)
for seed in range(10_000):
    run(engine, random_prompts(4, [40, 50], seed=seed + 100), greedy(8))
"""


def test_a_process_killed_while_it_stores_leaves_a_directory_to_start_from(tmp_path, truth):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, checkpoint("qwen3"), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert child.stdout is not None and child.stdout.readline() == b"running\n"
    deadline = time.monotonic() + 60
    while len(files(tmp_path)) < 60 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (directory,) = tmp_path.iterdir()
    (directory / "0-half.tmp").write_bytes(b"nanoKV01 torn")  # what it may have left
    engine = engine_on(tmp_path)
    assert not list(directory.glob("*.tmp"))
    assert engine.stats().tiers[1].cached_blocks >= 60
    assert outputs(engine) == truth
    _, disk = engine.stats().tiers
    assert disk.loaded_blocks > 0 and disk.failed_copies == 0
    engine.close()
