"""Replicas on the machines of a Ray cluster: Ray places their processes, and nothing else.

    Replicas ── actor of Ray: where ──> a process on some machine
             <═══ TCP: rows, outputs ══ replica.main, as on this machine

So a job over a cluster is the same job: one process reads, writes and resumes, and counts the
deaths under each row.

Called by `cli/batch.py`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from nanoengine.errors import ConfigError, MissingDependencyError
from nanoengine.parallel import replica
from nanoengine.parallel.replicas import Launch, Replicas
from nanoengine.settings.config import EngineConfig

try:
    import ray  # type: ignore[import-not-found]
except ImportError as error:
    raise MissingDependencyError(
        "a cluster needs Ray: pip install 'nanoengine[ray]', of one version on all machines"
    ) from error

LOCAL = "local"
LOOK_S = 1.0
"""How often somebody who waits for an actor looks whether it has failed."""


KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A machine whose kernel has not answered for so long [s, s, times] is gone: one that has lost its
power closes no connection, and the other end would wait for it for ever."""


def _connection(caller: socket.socket) -> Connection:
    """A pipe over TCP."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # as on Linux
            caller.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(caller.detach())


class _Host:
    """The actor: its process becomes a replica."""

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        connection = _connection(socket.create_connection(address))
        answer_challenge(connection, key)
        replica.main(connection)


class RayProcess:
    """A process that Ray places.

    Args:
        resources: as `ray.remote` takes them.
    """

    def __init__(self, resources: dict[str, Any]) -> None:
        self._key = os.urandom(32)
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._listener.settimeout(LOOK_S)
        self._actor = ray.remote(**resources)(_Host).remote()
        self._served = self._actor.serve.remote(self._listener.getsockname(), self._key)

    def connect(self) -> Connection:
        """Waits until the actor calls.

        Raises:
            EOFError: it failed before.
        """
        with self._listener:
            while not ray.wait([self._served], timeout=0)[0]:
                try:
                    caller = _connection(self._listener.accept()[0])
                    deliver_challenge(caller, self._key)
                    return caller
                except (TimeoutError, AuthenticationError):
                    continue
        raise EOFError

    def kill(self) -> None:
        """Ends it at once."""
        ray.kill(self._actor)

    def how_ended(self) -> str:
        """Its machine has what it said, in Ray's logs."""
        ray.kill(self._actor)
        return "was lost"


class RayReplicas(Replicas):
    """Replicas on a cluster, which this process leaves when they are closed."""

    def close(self) -> None:
        """Ends all processes."""
        super().close()
        ray.shutdown()


def ray_replicas(
    options: dict[str, Any], address: str, count: int | None, threads: int | None = None
) -> Replicas:
    """Replicas on the cluster at `address`, or on one that is started here: "local".

    Args:
        count: None: one for each GPU, or one.
        threads: cores of each, on CPUs.

    Raises:
        ConfigError: the cluster can't be reached, or is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    config = EngineConfig.from_kwargs(**options)
    on_term = signal.getsignal(signal.SIGTERM)
    where = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, **where, log_to_driver=False)
    except Exception as error:
        raise ConfigError(f"--ray {address}: Ray can't be used there: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Why: Ray's own handler ends the process at once.
    try:
        return RayReplicas(options, _launches(config, count, threads))
    except BaseException:
        ray.shutdown()
        raise


def _launches(config: EngineConfig, count: int | None, threads: int | None) -> Sequence[Launch]:
    there = ray.cluster_resources()
    ranks = config.tensor_parallel_size
    gpus = 0 if config.device == "cpu" else int(there.get("GPU", 0))
    kind, each = ("GPU", ranks) if gpus else ("CPU", threads or 1)
    if count is None:
        count = max(1, gpus // ranks)
    if count * each > there.get(kind, 0):
        raise ConfigError(
            f"{count} replicas need {count * each} {kind}s, and the cluster has"
            f" {there.get(kind, 0):g}"
        )
    resources = {"num_gpus": each} if gpus else {"num_cpus": each}
    return [lambda: RayProcess(resources)] * count
