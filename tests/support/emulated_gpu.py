"""An emulated CUDA device: tensors report `cuda:0` and keep their values on the CPU.

    with EmulatedGPU() as gpu:
        engine = make_engine(..., device="cuda")      the package's own code for GPUs runs

    order     one vector clock per stream. If two streams access one tensor, one of them writes, and
              no event or wait orders them, both callers are listed in `gpu.disorder`
    waits     host synchronizations are counted in `gpu.waits`; inside a capture they raise
    devices   an operator or kernel with tensors on both host and device raises
    graphs    a replay repeats the recorded calls; before it, the allocations of all captures are
              overwritten, because graphs share a pool
    memory    bytes allocated now and at the peak; torch does not see the memory of graphs
    Triton    kernels run in its interpreter; each launch is first bound by Triton's own binder

It does not cover speed, races inside a kernel, and the rounding of 16-bit dtypes. Copies finish
immediately; only the clocks show that a GPU finishes them later. Unlike on a GPU, a capture also
runs the recorded calls.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction, create_function_from_signature

from nanoengine.runner import graphs

PACKAGE = Path(graphs.__file__).parent.parent
CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
NODE_BYTES = 2**13
"""Driver memory per kernel node of a graph; an arbitrary value."""
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero"}
WAITING |= {"unique_dim", "_unique2", "unique_consecutive", "repeat_interleave"}
UNCHECKED = replace(interpreter_builder.options, sanitize_overflow=False)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def call_site() -> str:
    """The function of the package that is calling."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(PACKAGE)):
            return f"{path[len(str(PACKAGE)) + 1 :]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "test"


# --- streams --------------------------------------------------------------------------------------


class Stream:
    """A stream. Its clock holds, per stream, how much work is done when its next work starts."""

    def __init__(self, gpu: EmulatedGPU, device: object = None) -> None:
        self.gpu, self.device = gpu, CUDA
        self.clock = Counter({self: 1}) | gpu.host_clock
        gpu.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.wait("stream.synchronize", self.clock)


class Event:
    def __init__(self, gpu: EmulatedGPU, enable_timing: bool = False) -> None:
        self.gpu, self.clock = gpu, Counter[Stream]()

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self.time = Counter((stream or self.gpu.stream).clock), time.perf_counter()

    def synchronize(self) -> None:
        self.gpu.wait("event.synchronize", self.clock)

    def elapsed_time(self, end: Event) -> float:
        assert end.clock <= self.gpu.host_clock, "an event that the host has not seen reached"
        return 1000 * (end.time - self.time)


# --- tensors --------------------------------------------------------------------------------------


class Storage:
    """The last reads and writes of one allocation, in the clocks of their streams."""

    def __init__(self, stream: Stream, num_bytes: int) -> None:
        self.stream, self.num_bytes, self.num_tensors = stream, num_bytes, 0
        self.reads: Counter[Stream] = Counter()
        self.writes: Counter[Stream] = Counter()


class GPUTensor(torch.Tensor):
    """A tensor that reports `cuda:0` and wraps `host_tensor`, which is on the CPU."""

    gpu: EmulatedGPU
    host_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, gpu: EmulatedGPU, host_tensor: torch.Tensor) -> GPUTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host_tensor.size(), strides=host_tensor.stride(),
            storage_offset=host_tensor.storage_offset(),
            dtype=host_tensor.dtype, device=CUDA,
        )  # fmt: skip
        tensor.gpu, tensor.host_tensor = gpu, host_tensor
        key = gpu.add(host_tensor)
        weakref.finalize(tensor, gpu.drop, key).atexit = False
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        gpu = next(t.gpu for t in tensors_of((args, kwargs)) if isinstance(t, GPUTensor))
        return gpu.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host_tensor.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __float__(self) -> float:
        return float(self.cpu())

    def is_pinned(self, device: object = None) -> bool:
        return False

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GPUTensor({self.host_tensor!r})"

    # Why by hand: these methods of torch query the device's driver, which does not exist.

    def __invert__(self) -> torch.Tensor:
        return torch.bitwise_not(self)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.aten.copy_.default(self, source, non_blocking)

    def _locate(self, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Splits an index: a view by everything but its tensors, and these tensors by dimension."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if any(entry is Ellipsis for entry in entries):
            at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
            num_dims = sum(entry is not None for entry in entries) - 1
            entries[at : at + 1] = [slice(None)] * (self.dim() - num_dims)
        by_tensor = [isinstance(e, (torch.Tensor, np.ndarray, list)) for e in entries]
        simple = [slice(None) if t else e for e, t in zip(entries, by_tensor, strict=True)]
        kept = [e for e in entries if not isinstance(e, (int, np.integer))]
        found = [torch.as_tensor(e) if isinstance(e, (np.ndarray, list)) else e for e in kept]
        tensors = [e if isinstance(e, torch.Tensor) else None for e in found]
        view = GPUTensor(self.gpu, self.host_tensor[tuple(simple)])
        return view, tensors if any(by_tensor) else []

    def __getitem__(self, index: Any) -> torch.Tensor:
        view, tensors = self._locate(index)
        return torch.ops.aten.index.Tensor(view, tensors) if tensors else view

    def __setitem__(self, index: Any, value: Any) -> None:
        view, tensors = self._locate(index)
        if tensors:
            if not isinstance(value, torch.Tensor):
                value = torch.full((), value, dtype=self.dtype, device=CUDA)
            torch.ops.aten.index_put_(view, tensors, value)
        elif isinstance(value, torch.Tensor):
            view.copy_(value)
        else:
            view.fill_(value)


class Watch(TorchDispatchMode):
    """Intercepts operators that have no GPUTensor among their arguments."""

    def __init__(self, gpu: EmulatedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.gpu.run(func, args, kwargs or {})


# --- graphs ---------------------------------------------------------------------------------------


class Graph:
    """The recording of a capture: calls, the tensors that they access, and allocations."""

    def __init__(self, gpu: EmulatedGPU) -> None:
        self.gpu = gpu
        self.calls: list[Callable[[], None]] = []
        self.touched: list[tuple[torch.Tensor, bool, str]] = []
        self.fresh: dict[int, torch.Tensor] = {}  # as bytes
        gpu.graphs.add(self)

    @property
    def pool_bytes(self) -> int:
        return sum(len(host_tensor) for host_tensor in self.fresh.values())

    def replay(self) -> None:
        gpu = self.gpu
        assert gpu.capturing is None
        gpu.num_replayed += 1
        for host_tensor, writes, name in self.touched:
            gpu.touch(host_tensor, writes, f"graph: {name}")
        with _disable_current_modes(), torch.inference_mode():
            for graph in gpu.graphs:
                for host_tensor in graph.fresh.values():
                    host_tensor.fill_(0xFF)  # a NaN in any float dtype
            for call in self.calls:
                call()


def repeated(func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Callable[[], None]:
    """A call that writes its results to the addresses of the capture."""

    def call() -> None:
        for old, new in zip(tensors_of(out), tensors_of(func(*args, **kwargs)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return call


# --- the device -----------------------------------------------------------------------------------


class EmulatedGPU:
    """See the module.

    Attributes:
        waits: synchronization and its caller -> count.
        disorder: unordered accesses -> count.
        kernels: launched operators, copies and Triton kernels, without replayed ones.
        num_allocated: [bytes] in live tensors.
    """

    def __init__(self, memory_bytes: int = 2**32) -> None:
        self.memory_bytes = memory_bytes
        self.waits: Counter[str] = Counter()
        self.disorder: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.num_allocated = self.peak = self.num_replayed = 0
        self.host_clock: Counter[Stream] = Counter()
        self.streams: list[Stream] = []
        self.stream = Stream(self)
        self.capturing: Graph | None = None
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._storages: dict[int, Storage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._binders: dict[Any, Callable[..., Any]] = {}

    # --- ordering and memory ------------------------------------------------------------------

    def wait(self, what: str, clock: Counter[Stream] | None = None) -> None:
        """Makes the host wait until the device has reached `clock`; None: finished all work."""
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits[f"{what}, {call_site()}"] += 1
        for known in [stream.clock for stream in self.streams] if clock is None else [clock]:
            self.host_clock |= known

    def add(self, host_tensor: torch.Tensor) -> int:
        """Counts a tensor's storage once; returns its key."""
        key = host_tensor.untyped_storage()._cdata
        if key not in self._storages:
            num_bytes = -(-host_tensor.untyped_storage().nbytes() // 512) * 512
            self._storages[key] = Storage(self.stream, num_bytes)
            self.num_allocated += num_bytes
            self.peak = max(self.peak, self.num_allocated)
        self._storages[key].num_tensors += 1
        return key

    def drop(self, key: int) -> None:
        """Releases one tensor of a storage; the last one returns the memory to the owner."""
        storage = self._storages[key]
        storage.num_tensors -= 1
        if not storage.num_tensors:
            self.num_allocated -= storage.num_bytes
            del self._storages[key]
            if not (storage.reads | storage.writes) <= (storage.stream.clock | self.host_clock):
                self.disorder["memory freed while another stream may still use it"] += 1

    def touch(self, host_tensor: torch.Tensor, writes: bool, name: str) -> None:
        """Records that the current stream reads or writes a tensor."""
        if self.capturing is not None:
            self.capturing.touched.append((host_tensor, writes, name))
            return
        storage = self._storages.get(host_tensor.untyped_storage()._cdata)
        if storage is None:  # of a graph's pool: one stream replays all graphs
            return
        stream = self.stream
        stream.clock = stream.clock | self.host_clock
        stream.clock[stream] += 1
        seen = (storage.reads | storage.writes) if writes else storage.writes
        if any(at > stream.clock[other] for other, at in seen.items()):
            verb = "writes" if writes else "reads"
            self.disorder[f"{name} {verb} what another stream uses, {call_site()}"] += 1
        (storage.writes if writes else storage.reads)[stream] = stream.clock[stream]

    def is_pinned(self, tensor: torch.Tensor, device: object = None) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        pool = max((graph.pool_bytes for graph in self.graphs), default=0)
        nodes = sum(len(graph.calls) for graph in self.graphs) * NODE_BYTES
        return self.memory_bytes - self.num_allocated - pool - nodes, self.memory_bytes

    # --- operators ----------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs any torch operator on this device."""
        args, kwargs = tree_map(with_index, (args, kwargs))
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):  # in inference mode these are not decomposed
            with Watch(self):
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        name, device = func.overloadpacket.__name__, kwargs.get("device")
        to = None if device is None else torch.device(device).type
        tensors = tensors_of((args, kwargs))
        if to != "cuda" and not any(isinstance(t, GPUTensor) for t in tensors):
            return self._run_on_host(func, args, kwargs)
        if name in ("copy_", "_to_copy"):
            target = args[0] if name == "copy_" else to
            source = args[1] if name == "copy_" else args[0]
            if target == "cpu" or type(target) is torch.Tensor:
                return self._download(target, source, kwargs, args)
            if type(source) is torch.Tensor:
                return self._upload(target, source, kwargs, args)
        self._check(name, args, tensors)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        host = {"device": torch.device("cpu")} if to and name != "_to_copy" else {}
        return self._launch(func, name, args, kwargs | host)

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pin = kwargs.get("pin_memory")
        out = func(*args, **(kwargs | {"pin_memory": False} if pin else kwargs))
        if pin:
            assert self.capturing is None, "memory is pinned inside a capture"
            self._pinned[out.untyped_storage()._cdata] = out.untyped_storage()
        return out

    def _check(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        """Raises if devices are mixed; records synchronizations of the host."""
        if any(type(t) is torch.Tensor and t.dim() for t in tensors):
            if name not in INDEXING:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
            self.wait(f"{name} by an index on the host")
        masks = tensors_of(args[1]) if name in INDEXING else []
        if name in WAITING or any(t.dtype in (torch.bool, torch.uint8) for t in masks):
            self.wait(name)

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Runs an operator on the wrapped tensors and wraps its results."""
        written = set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= {id(t) for t in tensors_of(given)}
        ours = [t for t in tensors_of((args, kwargs)) if isinstance(t, GPUTensor)]
        known = {t.host_tensor.untyped_storage()._cdata for t in ours}
        held_args, held_kwargs = tree_map(unwrapped, (args, kwargs))
        out = func(*held_args, **held_kwargs)
        fresh = [t for t in tensors_of(out) if t.untyped_storage()._cdata not in known]
        if self.capturing is not None:
            for tensor in fresh:
                if tensor.numel() and tensor.dtype != torch.bool:
                    self.capturing.fresh[tensor.untyped_storage()._cdata] = bytes_of(tensor)
        by_host_tensor = {id(t.host_tensor): t for t in ours}  # in-place results keep their wrapper

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or id(value) in by_host_tensor:
                return by_host_tensor.get(id(value), value)
            return GPUTensor(self, value)

        results = tree_map(wrapped, out)
        if written or (fresh and "empty" not in name):  # else it is a view
            self.kernels[name] += 1
            for tensor in ours:
                self.touch(tensor.host_tensor, id(tensor) in written, name)
            for tensor in fresh:
                self.touch(tensor, True, name)
            if self.capturing is not None:
                self.capturing.calls.append(repeated(func, held_args, held_kwargs, out))
        return results

    def _download(self, target: Any, source: Any, kwargs: Any, args: Any) -> torch.Tensor:
        """Copies from the device to the host; asynchronous only to pinned memory, if requested."""
        asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
        self.kernels["download"] += 1
        self.touch(source.host_tensor, False, "download")
        if target == "cpu":
            self.wait("a download", self.stream.clock)
            return source.host_tensor.to(kwargs.get("dtype") or source.dtype, copy=True)
        if not (asked and self.is_pinned(target)):
            self.wait("a download", self.stream.clock)
        assert self.capturing is None, "a download inside a capture"
        return target.copy_(source.host_tensor)

    def _upload(self, target: Any, source: Any, kwargs: Any, args: Any) -> torch.Tensor:
        """Copies from the host to the device."""
        self.kernels["upload"] += 1
        asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if source.dim() and not (asked and self.is_pinned(source)):
            self.wait("an upload")
        assert self.capturing is None, "an upload inside a capture"
        if not isinstance(target, GPUTensor):
            host_tensor = source.to(kwargs.get("dtype") or source.dtype, copy=True)
            target = GPUTensor(self, host_tensor)
        else:
            target.host_tensor.copy_(source)
        self.touch(target.host_tensor, True, "upload")
        return target

    # --- Triton -------------------------------------------------------------------------------

    def launch_kernel(
        self, kernel: InterpretedFunction, args: Sequence[Any], grid: Any, options: dict[str, Any]
    ) -> None:
        """Binds a launch as Triton's compiler would, then runs it in the interpreter."""
        name = kernel.fn.__name__
        host_args = [unwrapped(argument) for argument in args]
        if any(type(argument) is torch.Tensor for argument in args):
            raise ValueError(f"{name}: pointer argument is on the host")
        # Why 0 is fine: Triton's own launcher skips a launch of no programs.
        assert all(map(operator.le, grid, (2**31 - 1, 65535, 65535))), (name, grid)
        if kernel not in self._binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            backend = CUDABackend(GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32))
            self._binders[kernel] = create_function_from_signature(
                compiled.signature, compiled.params, backend
            )
        self._binders[kernel](*host_args, **options)
        run = functools.partial(
            INTERPRETED_RUN, kernel, *host_args, grid=grid, warmup=False, **options
        )
        tensors = {t.untyped_storage()._cdata: t for t in tensors_of(host_args)}
        with _disable_current_modes():
            before = [bytes_of(tensor).clone() for tensor in tensors.values()]
            run()
            changed = [
                not torch.equal(old, bytes_of(tensor))
                for old, tensor in zip(before, tensors.values(), strict=True)
            ]
        self.kernels[name] += 1
        for tensor, writes in zip(tensors.values(), changed, strict=True):
            self.touch(tensor, writes, name)
        if self.capturing is not None:
            self.capturing.calls.append(run)

    # --- replacements for torch.cuda ----------------------------------------------------------

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def capture(
        self, graph: Graph, pool: object = None, stream: Stream | None = None
    ) -> Iterator[None]:
        self.wait("capture")
        with self.on_stream(stream or Stream(self)):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None

    def _replacements(self) -> dict[str, Any]:
        """Replacements for functions of torch.cuda while the device is active."""

        def reset_peak(device: object = None) -> None:
            self.peak = self.num_allocated

        properties = types.SimpleNamespace(
            name="emulated", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=4,
            total_memory=self.memory_bytes,
        )  # fmt: skip
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(),
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_name": lambda device=None: properties.name,
            "mem_get_info": self.mem_get_info,
            "memory_allocated": lambda device=None: self.num_allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": reset_peak,
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "Stream": functools.partial(Stream, self),
            "Event": functools.partial(Event, self),
            "stream": self.on_stream,
            "current_stream": lambda device=None: self.stream,
            "CUDAGraph": functools.partial(Graph, self),
            "graph": self.capture,
            "graph_pool_handle": lambda: (0, 1),
        }

    def __enter__(self) -> EmulatedGPU:
        self._stack = stack = contextlib.ExitStack()
        for name, value in self._replacements().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            self.launch_kernel(kernel, args, grid, options)

        for owner, name, value in (
            (InterpretedFunction, "run", run),
            # Why: a check after each sum took a quarter of the time; kernel tests contain it.
            (interpreter_builder, "options", UNCHECKED),
            (torch.Tensor, "is_pinned", lambda t, device=None: self.is_pinned(t)),
            (torch.Tensor, "to", to_device),
            (torch, "Generator", HostGenerator),
            (torch, "tensor", create_on_host(torch.tensor)),
            (torch, "as_tensor", create_on_host(torch.as_tensor)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        graphs.capture_stream.cache_clear()
        stack.callback(graphs.capture_stream.cache_clear)
        stack.enter_context(Watch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


INTERPRETED_RUN, TO = InterpretedFunction.run, torch.Tensor.to
GENERATOR = torch.Generator


def with_index(value: Any) -> Any:
    """Why: for a device without an index, torch asks the driver for the current one."""
    return CUDA if isinstance(value, torch.device) and value.type == "cuda" else value


def unwrapped(value: Any) -> Any:
    return value.host_tensor if isinstance(value, GPUTensor) else value


def to_device(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """`Tensor.to`, which queries the driver before any dispatch."""
    return TO(tensor, *map(with_index, args), **{k: with_index(v) for k, v in options.items()})


class HostGenerator:
    """Replaces `torch.Generator`: the device uses the host's random numbers."""

    def __new__(cls, device: object = None) -> torch.Generator:  # type: ignore[misc]
        return GENERATOR("cpu")


def create_on_host(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor and torch.as_tensor fill a tensor on its device and bypass the dispatcher."""

    @functools.wraps(original)
    def create(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return original(data, *args, device=device, **options)
        if isinstance(data, GPUTensor):
            return data.to(*args, **options)
        return original(data, *args, **options).to(CUDA)

    return create
