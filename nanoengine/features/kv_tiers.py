"""Storage of KV tiers: HostStorage for host memory, DiskFiles for the disk.

    kv [2, slices, blocks, ...] ── HostStorage ── blocks [host blocks, 2, slices, ...] ── DiskFiles
                                                                │
    path/<fingerprint>/<group>-<digest>.kv      one file per block: header, checksum, bytes
    path/<fingerprint>/lock                     held by the one process that writes

`core/tiers/` decides which blocks are copied when; this file does not depend on sequences. With the
CPU device, host memory is ordinary memory. With a GPU it is pinned and copied on side streams; this
has not been run on a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import gc
import itertools
import json
import logging
import math
import os
import stat
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from nanoengine.checkpoint.files import checkpoint_files, file_digest
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_tree import DIGEST_BYTES, Prefix, PrefixTree, pack
from nanoengine.core.tiers.cost import CostModel, LoadCost
from nanoengine.core.tiers.disk import DiskCopy, FinishedCopy
from nanoengine.core.tiers.lookup import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.errors import ConfigError
from nanoengine.runner.kv_cache import zeros
from nanoengine.runner.memory import GIB, require_memory, staging_blocks
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.transfers import ship
from nanoengine.settings.tiers import Tier

FORMAT_VERSION = 2
MAGIC = b"nanoKV%02d" % FORMAT_VERSION
CHECKSUM_BYTES = 16
MAX_HEADER_BYTES = 2**20
"""Maximum size of a header. A longer one is not ours: it would hold about 150,000 token ids."""
CHUNK_BYTES = 2**30
"""Maximum size of one allocation of pinned memory."""
MAX_DISK_BLOCKS = 2**20
"""Maximum number of blocks of a disk tier: each costs about 300 bytes of host memory."""
HOST_SETUP_S, DISK_SETUP_S = 0.0002, 0.002
"""Fixed time per load in addition to the transfer [s]."""

OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

log = logging.getLogger(__name__)


# --- host -----------------------------------------------------------------------------------------


class HostStorage:
    """Blocks in host memory, copied to the device and back. A TierStorage.

    With a GPU, copies must neither delay the steps nor read blocks that a later step overwrites.
    So a step's blocks pass through two buffers on the GPU, alternately:

        store   kv ── one kernel, main stream ──► buffer ── copies, a side stream ──► host
        load    kv ◄── one kernel, main stream ── buffer ◄── copies, another one ──── host

    The GPU waits for copies only if a step stores more blocks than the buffers hold. Blocks that
    are adjacent in host memory are one copy.

    Args:
        kv: the device's cache, [2, slices, num_blocks, ...]; may be a view of a larger tensor.
        num_blocks: size of the tier, including its null block.
        dim: the dimension of `kv` that counts the blocks.
    """

    # Why inference mode: tensors created in it, such as the cache, can't be written outside.

    @torch.inference_mode()
    def __init__(self, kv: torch.Tensor, num_blocks: int, dim: int = 2) -> None:
        # Why bytes: index_select does not support fp8.
        kv = kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
        self._kv = kv.movedim(dim, 0)  # [num_blocks, 2, slices, ...]
        shape, self._on_gpu = self._kv.shape[1:], kv.device.type == "cuda"
        if not self._on_gpu:
            self.chunks = [zeros((num_blocks, *shape), kv.dtype, kv.device)]
        else:
            block_bytes = math.prod(shape) * kv.dtype.itemsize
            self.chunks = [
                torch.empty((size, *shape), dtype=kv.dtype, pin_memory=True)
                for size in chunk_sizes(num_blocks, block_bytes)
            ]
            self._store_stream, self._load_stream = (torch.cuda.Stream(kv.device) for _ in "12")
            size, now = (staging_blocks(block_bytes), *shape), self._main_event()
            buffers = [torch.empty(size, dtype=kv.dtype, device=kv.device) for _ in range(2)]
            # Each buffer, and the event after which it may be written; in the order of use.
            self._staging = deque((buffer, now) for buffer in buffers)
        self._starts = list(itertools.accumulate((len(c) for c in self.chunks[:-1]), initial=0))

    def as_bytes(self) -> list[NDArray[np.uint8]]:
        """The tier's memory by block: [blocks, bytes per block]."""
        flat = [chunk.view(len(chunk), -1).view(torch.uint8).numpy() for chunk in self.chunks]
        return [block for blocks in flat for block in blocks]

    @torch.inference_mode()
    def store(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> Callable[[], None]:
        """Copies device blocks to the tier; the returned function waits for the copies."""
        if not self._on_gpu:
            # Why one by one: an integer index is a view, which copy_ writes to; a list as index
            # creates a temporary tensor, and writes to it are lost.
            for src, dst in zip(src_ids, dst_ids, strict=True):
                self._host_blocks(dst, 1)[0].copy_(self._kv[src])
            return lambda: None
        main = torch.cuda.current_stream(self._kv.device)
        for src, dst in self._split(src_ids, dst_ids):
            buffer, free = self._staging[0]
            main.wait_event(free)
            (ids,) = ship(self._kv.device, np.array(src))
            torch.index_select(self._kv, 0, ids, out=buffer[: len(src)])
            self._store_stream.wait_stream(main)
            with torch.cuda.stream(self._store_stream):
                for first, last in self._runs(dst):
                    blocks = self._host_blocks(dst[first], last - first)
                    blocks.copy_(buffer[first:last], non_blocking=True)
            stored = self._store_stream.record_event()
            self._rotate_staging(buffer, stored)
        return stored.synchronize

    @torch.inference_mode()
    def load(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> float:
        """Copies the tier's blocks to the device; returns the seconds of the copies, without
        earlier work of the device."""
        started, seconds = time.perf_counter(), 0.0
        if not self._on_gpu:
            for src, dst in zip(src_ids, dst_ids, strict=True):
                self._kv[dst].copy_(self._host_blocks(src, 1)[0])
            return time.perf_counter() - started
        for src, dst in self._split(src_ids, dst_ids):
            buffer, free = self._staging[0]
            free.synchronize()
            started = time.perf_counter()
            with torch.cuda.stream(self._load_stream):
                for first, last in self._runs(src):
                    blocks = self._host_blocks(src[first], last - first)
                    buffer[first:last].copy_(blocks, non_blocking=True)
            self._load_stream.record_event().synchronize()
            seconds += time.perf_counter() - started
            (ids,) = ship(self._kv.device, np.array(dst))
            self._kv.index_copy_(0, ids, buffer[: len(dst)])
            self._rotate_staging(buffer, self._main_event())
        return seconds

    def _rotate_staging(self, buffer: torch.Tensor, free: torch.cuda.Event) -> None:
        """Makes the other buffer the next one; this one may be written again after `free`."""
        self._staging[0] = (buffer, free)
        self._staging.rotate(-1)

    def _main_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._kv.device).record_event()

    def _split(self, *ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
        """Splits the lists into pieces of the buffers' size."""
        size = len(self._staging[0][0])
        for start in range(0, len(ids[0]), size):
            yield [each[start : start + size] for each in ids]

    def _runs(self, host_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ranges of the list, as (first, end), whose host blocks are adjacent."""
        ends = [
            i
            for i, (before, host_id) in enumerate(itertools.pairwise(host_ids), 1)
            if host_id != before + 1 or host_id in self._starts
        ]
        return itertools.pairwise([0, *ends, len(host_ids)])

    def _host_blocks(self, first: int, count: int) -> torch.Tensor:
        """`count` blocks of the tier from `first` on, all in one chunk."""
        chunk = bisect.bisect_right(self._starts, first) - 1
        offset = first - self._starts[chunk]
        return self.chunks[chunk][offset : offset + count]


class BlocksAndStates:
    """Two storages as one TierStorage, for a model with recurrent states.

    Args:
        device_blocks, host_blocks: number of blocks, including the null block; the ids of states
            follow.
    """

    def __init__(
        self, blocks: HostStorage, states: HostStorage, *, device_blocks: int, host_blocks: int
    ) -> None:
        self._blocks, self._states, self._device_blocks = blocks, states, device_blocks
        # Why minus one: the first state's slot is 1, after the null slot.
        self._first = np.array([[device_blocks - 1], [host_blocks - 1]])

    def store(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> Callable[[], None]:
        """See `HostStorage.store`."""
        parts = self._split_ids(src_ids, dst_ids)
        waits = [storage.store(device, host) for storage, device, host in parts]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def load(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> float:
        """See `HostStorage.load`."""
        parts = self._split_ids(dst_ids, src_ids)
        return sum(storage.load(host, device) for storage, device, host in parts)

    def _split_ids(
        self, device_ids: Sequence[int], host_ids: Sequence[int]
    ) -> Iterator[tuple[HostStorage, list[int], list[int]]]:
        """The ids that each storage copies, in its own numbering."""
        ids = np.array([device_ids, host_ids])
        is_state = ids[0] >= self._device_blocks
        blocks, states = ids[:, ~is_state], ids[:, is_state] - self._first
        for storage, local_ids in ((self._blocks, blocks), (self._states, states)):
            if local_ids.size:
                yield storage, *local_ids.tolist()


def chunk_sizes(num_blocks: int, block_bytes: int) -> list[int]:
    """The number of blocks in each piece of pinned memory.

    Why pieces: torch rounds each allocation up to a power of two, so 20 GiB would pin 32 GiB. Each
    piece here is smaller than a power of two by less than one block.
    """
    power = max(CHUNK_BYTES, 1 << (block_bytes - 1).bit_length())
    sizes = []
    while num_blocks:
        if (count := power // block_bytes) <= num_blocks:
            sizes.append(count)
            num_blocks -= count
        else:
            power //= 2
    return sizes


# --- disk -----------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The header of a block's file; `digest` and `parent` are from the block's prefix."""

    group: int
    digest: bytes
    parent: bytes
    token_ids: list[int]


class DiskFiles:
    """One file per block, in a directory per model. A DiskStorage.

    - A process may be killed at any time. So a file is written under another name and renamed, and
      it is used only if its header and checksum are valid. Files are not flushed to the device; the
      checksum detects files damaged by a power failure.
    - The checksum has no key: anyone with write access determines the model's answers. So only this
      user has access to the directory.
    - One process at a time writes and removes files: the holder of the lock. Others read the files
      that existed when they started.
    - No disk failure raises: it is logged once, and the block is a miss.

    Args:
        path: the directory of all models.
        fingerprint: identifies the model, its numerics and the layout of its blocks.
        host: the host tier's memory, [blocks, bytes per block].

    Raises:
        ConfigError: the path is a file, or a part of it is.
    """

    def __init__(
        self, path: str | os.PathLike[str], fingerprint: str, host: Sequence[NDArray[np.uint8]]
    ):
        try:
            self.directory = Path(path).expanduser() / fingerprint
        except RuntimeError as error:
            raise ConfigError(f"DiskTier path {str(path)!r} has no home: {error}") from error
        self._fingerprint = fingerprint
        self._host = host
        self._reported: set[str] = set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk")
        self._in_flight: deque[Future[FinishedCopy]] = deque()
        # Why a finalizer: an engine that was dropped, or failed at start, is never closed.
        lock = self._acquire_lock()
        self._release = None if lock is None else weakref.finalize(self, lock.release)
        self.can_write = self._accepts_writes = lock is not None

    def _acquire_lock(self) -> FileLock | None:
        """Creates and locks the directory; None if this process may only read."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
            # Why not by thread: garbage collection in any thread may release it.
            lock = FileLock(self.directory / "lock", mode=0o600, thread_local=False)
            for _ in range(2):
                with contextlib.suppress(Timeout):
                    lock.acquire(blocking=False)
                    return lock
                gc.collect()  # Why: a dropped engine may hold it until it is collected
        except (FileExistsError, NotADirectoryError) as error:
            path = self.directory.parent
            raise ConfigError(
                f"DiskTier path {str(path)!r} must be a directory: {error}"
            ) from error
        except OSError as error:
            self._report("lock", f"can't be written ({error}); it is only read")
            return None
        self._report("lock", "is locked by another process or engine; it is only read")
        return None

    # --- DiskStorage --------------------------------------------------------------------------

    def scan(self, prefixes: PrefixTree) -> list[Content]:
        """The content of the directory, least recently used first.

        Removes damaged and incomplete files, and files whose whole prefix is not there.
        """
        found: list[tuple[int, Header, Path]] = []
        try:
            paths = sorted(self.directory.iterdir())
        except OSError as error:
            self._report("scan", f"can't be read: {error}")
            return []
        for path in paths:
            if path.suffix == ".tmp":
                self._unlink(path)
            elif path.suffix == ".kv":
                try:
                    found.append((*self._read_header(path), path))
                except PermissionError as error:
                    self._report("scan", f"can't be read: {error}")
                except (OSError, Damaged):
                    self._drop_damaged(path)
        found.sort(key=lambda entry: entry[0])
        known = link_prefixes([header for _, header, _ in found], prefixes)
        contents = []
        for _, header, path in found:
            prefix = known.get(header.digest)
            if prefix is None or prefix.token_ids != header.token_ids:
                self._unlink(path)
            else:
                contents.append(Content(header.group, prefix))
        return contents

    def submit(self, copy: DiskCopy) -> None:
        """Queues a copy for the worker thread, which processes them in order."""
        self._in_flight.append(self._worker.submit(self._run_copy, copy))

    def collect(self, wait_s: float) -> list[FinishedCopy]:
        """Finished copies, in order; waits up to `wait_s`, which may be infinite, for the first."""
        if wait_s and self._in_flight:
            wait([self._in_flight[0]], timeout=wait_s if math.isfinite(wait_s) else None)
        finished = []
        while self._in_flight and self._in_flight[0].done():
            finished.append(self._in_flight.popleft().result())
        self.can_write = self._accepts_writes
        return finished

    def close(self) -> None:
        """Finishes the running copies and allows another process to write."""
        self._worker.shutdown(wait=True)
        self.can_write = self._accepts_writes = False
        if self._release is not None:
            self._release()
            self._release = None

    # --- in the worker thread -----------------------------------------------------------------

    def _run_copy(self, copy: DiskCopy) -> FinishedCopy:
        started = time.perf_counter()
        group, prefix = copy.content
        path = self.directory / f"{group}-{prefix.digest.hex()}.kv"
        if copy.kind == "remove":
            ok = self._unlink(path)
        else:
            header = Header(group, prefix.digest, prefix.parent.digest, prefix.token_ids)
            move = self._write if copy.kind == "write" else self._read
            ok = move(path, self._pack(header), self._host[copy.host_id])
        return FinishedCopy(copy, ok, time.perf_counter() - started)

    def _write(self, path: Path, header: bytes, data: NDArray[np.uint8]) -> bool:
        if not self._accepts_writes:
            return False
        temporary = path.with_suffix(".tmp")
        try:
            # Why "x": does not write through an existing file, such as a link.
            with open(temporary, "xb", opener=_opener) as file:
                file.write(header + checksum(header, data))
                file.write(data.data)
            os.replace(temporary, path)
        except (FileExistsError, IsADirectoryError):
            self._drop_damaged(temporary)
            return False
        except OSError as error:
            self._accepts_writes = False
            self._report("write", f"stores no more blocks: {error}")
            self._unlink(temporary)
            return False
        return True

    def _read(self, path: Path, header: bytes, data: NDArray[np.uint8]) -> bool:
        """Reads a file into its host block; False if the file is not as expected.

        The header is compared with the expected header of this content, so format, model, tokens
        and parent are checked as well.
        """
        try:
            with _open_regular(path) as file:
                found = file.read(len(header))
                expected = file.read(CHECKSUM_BYTES)
                size = file.readinto(data.data)
                is_complete = size == len(data) and not file.read(1)
            if not is_complete or found != header or checksum(header, data) != expected:
                raise Damaged(path)
        except Damaged:
            self._drop_damaged(path)
            return False
        except FileNotFoundError:
            self._report("missing", f"has lost files (first: {path.name}), which are cache misses")
            return False
        except OSError as error:
            self._report("read", f"can't be read: {error}")
            return False
        # Why: after a restart, file times determine which blocks were used last.
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    # --- files --------------------------------------------------------------------------------

    def _pack(self, header: Header) -> bytes:
        fields = {
            "fingerprint": self._fingerprint,
            "group": header.group,
            "digest": header.digest.hex(),
            "parent": header.parent.hex(),
            "token_ids": header.token_ids,
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        return MAGIC + struct.pack("<I", len(text)) + text

    def _read_header(self, path: Path) -> tuple[int, Header]:
        """When a file was last used [ns], and its header.

        Raises:
            Damaged: the file is not a block's file, or incomplete.
            OSError: the file can't be read.
        """
        with _open_regular(path) as file:
            start = file.read(len(MAGIC) + 4)
            length = int.from_bytes(start[len(MAGIC) :], "little")
            text = file.read(min(length, MAX_HEADER_BYTES))
            status = os.fstat(file.fileno())
        try:
            fields = json.loads(text)
            digest, parent = bytes.fromhex(fields["digest"]), bytes.fromhex(fields["parent"])
            header = Header(fields["group"], digest, parent, fields["token_ids"])
            is_valid = self._pack(header) == start + text and pack(header.token_ids)
        except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise Damaged(path) from error
        size = len(start) + len(text) + CHECKSUM_BYTES + len(self._host[0])
        is_group = type(header.group) is int and header.group >= 0
        if not is_valid or not is_group or status.st_size != size:
            raise Damaged(path)
        return status.st_mtime_ns, header

    def _drop_damaged(self, path: Path) -> None:
        self._report("damaged", f"had damaged files (first: {path.name}), which are removed")
        self._unlink(path)

    def _unlink(self, path: Path) -> bool:
        """Removes a file if this process holds the lock; returns whether it was removed."""
        if self._release is None:
            return False
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._report("unlink", f"can't be written: {error}")
            return False
        return True

    def _report(self, kind: str, message: str) -> None:
        """Logs one warning per kind of failure."""
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("KV disk tier: %s %s", self.directory, message)


class Damaged(Exception):
    """A file's content is not as expected."""


def _opener(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file for this user only; where the system supports it, does not follow a link or wait
    for the other end of a FIFO."""
    return os.open(path, flags | OPEN_FLAGS, 0o600)


def _open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading.

    Raises:
        Damaged: it is a link, a directory or another special file.
    """
    try:
        file = open(path, "rb", opener=_opener)  # noqa: SIM115
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise Damaged(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged(path)
    return file


def link_prefixes(headers: Sequence[Header], prefixes: PrefixTree) -> dict[bytes, Prefix]:
    """The prefixes of these headers by digest, if all of their ancestors are there, too.

    A header contains its own block's tokens and its parent's digest; the parent's tokens are in
    another file.
    """
    children: dict[bytes, list[Header]] = defaultdict(list)
    for header in headers:
        children[header.parent].append(header)
    known: dict[bytes, Prefix] = {}
    roots = [name for name in children if len(name) != DIGEST_BYTES]
    parents = [prefixes.root_of_digest(name) for name in roots]
    while parents:
        parent = parents.pop()
        for child in children.pop(parent.digest, ()):
            prefix = prefixes.extend(parent, child.token_ids)
            if prefix.digest == child.digest:
                known[child.digest] = prefix
                parents.append(prefix)
    return known


def checksum(header: bytes, data: NDArray[np.uint8]) -> bytes:
    """A 128-bit checksum of the header and the bytes of a block."""
    digest = xxhash.xxh3_128(header)
    digest.update(data.data)
    return digest.digest()


def model_fingerprint(files: Sequence[Path], facts: Mapping[str, object]) -> str:
    """A digest of everything that a block's bytes depend on, in 32 hex digits.

    Args:
        files: config.json, and the files with the weights.
        facts: numerics and layout.
    """
    digest = xxhash.xxh3_128(repr((FORMAT_VERSION, sorted(facts.items()))).encode())
    for path in files:
        digest.update(file_digest(path))
    return digest.hexdigest()


# --- putting it together --------------------------------------------------------------------------


def tiered_cache(runner: ModelRunner, layout: KVLayout) -> TieredPrefixCache:
    """The cache for `kv_tiers`; also sets the runner's storage of the tiers.

    Raises:
        ConfigError: a tier is too small for one block, or larger than the memory; or there is a
            DiskTier and the model has recurrent states, which are not written to disk.
    """
    config, directory = runner.options.config, runner.options.directory
    host, disk, *_ = (*config.kv_tiers, None)
    require_memory(f"HostTier gib={host.gib}", host.gib * GIB, torch.device("cpu"))
    kv, states = runner.kv_cache.kv, runner.kv_cache.states
    if states is not None and disk is not None:
        raise ConfigError(
            "kv_tiers: DiskTier is not supported for models with recurrent states; use only a"
            " HostTier"
        )
    num_host_states = num_states(host, layout)
    num_host_blocks = num_blocks(host, layout.block_bytes, num_host_states * layout.state_bytes)
    num_disk_blocks = min(num_blocks(disk, layout.block_bytes), MAX_DISK_BLOCKS) if disk else 1
    storage = blocks = HostStorage(kv, num_host_blocks + 1)
    if states is not None:
        storage = BlocksAndStates(
            blocks,
            HostStorage(states, num_host_states + 1, dim=1),
            device_blocks=layout.num_blocks,
            host_blocks=num_host_blocks + 1,
        )
    runner.tier_storage = {"host": storage}
    disk_files = None
    if disk is not None:
        files = [directory / "config.json"] if directory.is_dir() else []
        if config.load_format == "auto":
            files += checkpoint_files(directory)
        facts = {
            # Why: everything that changes the bytes of a block must be here.
            "weights": config.load_format,
            "seed": config.seed if config.load_format == "dummy" else None,
            "dtype": runner.dtype,
            "quantization": runner.options.quantization,
            "kv_dtype": runner.kv_dtype,
            "key_factors": [each.weight.tolist() for each in runner.model.key_factors],
            "deterministic": config.deterministic,
            "attention_backend": runner.options.backend,
            "layout": runner.backend.kv_layout,
            "block_size": layout.block_size,
            "groups": layout.groups,
        }
        disk_files = DiskFiles(disk.path, model_fingerprint(files, facts), blocks.as_bytes())
    costs = [  # Why the host's again: without a disk its cost is not used.
        LoadCost(layout.block_bytes, setup_s, tier.policy)
        for tier, setup_s in ((host, HOST_SETUP_S), (disk or host, DISK_SETUP_S))
    ]
    try:
        return TieredPrefixCache(
            layout,
            num_host_blocks=num_host_blocks,
            cost=CostModel(host=costs[0], disk=costs[1]),
            disk=disk_files,
            num_disk_blocks=num_disk_blocks,
            num_host_states=num_host_states,
        )
    except BaseException:
        if disk_files is not None:
            disk_files.close()
        raise


def num_states(tier: Tier, layout: KVLayout) -> int:
    """Number of states in a tier: it has the same share of states and blocks as the device."""
    state_bytes = layout.num_states * layout.state_bytes
    if not state_bytes:
        return 0
    share = state_bytes / (state_bytes + layout.num_blocks * layout.block_bytes)
    return max(1, int(tier.gib * GIB * share) // layout.state_bytes)


def num_blocks(tier: Tier, block_bytes: int, reserved_bytes: int = 0) -> int:
    """Number of whole blocks that fit into a tier, in addition to `reserved_bytes`."""
    count = (int(tier.gib * GIB) - reserved_bytes) // block_bytes
    if count < 1:
        raise ConfigError(
            f"{type(tier).__name__} gib={tier.gib} is too small for a block of {block_bytes} bytes"
        )
    return count
