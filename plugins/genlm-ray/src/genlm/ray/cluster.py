"""The connection to Ray: one a process, shared by its models, and ended with the last of them."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from typing import Any, ClassVar
from urllib.parse import urlsplit

from genlm.core import checks
from genlm.core.errors import BackendUnavailableError, InvalidOptionError

#: Ray's name for a cluster that this program starts on its own machine.
LOCAL = "local"

#: Seconds to wait for a connection to a cluster's head.
CONNECT_TIMEOUT = 10.0


class Cluster:
    """Joins a running cluster, or starts one on this machine. A cluster that the program itself is
    connected to already is used, and left alone.

    Args:
        address: As ``ray.init`` takes it; ``None`` takes ``RAY_ADDRESS``, else starts one.
        may_start: Whether that is wanted.

    Raises:
        BackendUnavailableError: there is no cluster at the address.
        InvalidOptionError: this process is connected to another one, or none is named.
    """

    _lock = threading.Lock()
    _users: ClassVar[set[Cluster]] = set()  # of the connection that we made
    _joined = ""  # where that leads

    def __init__(self, address: str | None, *, may_start: bool = True) -> None:
        import ray

        self.ray: Any = ray
        wanted = address or os.environ.get("RAY_ADDRESS") or LOCAL
        with self._lock:
            if not ray.is_initialized():
                if wanted == LOCAL and not may_start:
                    raise InvalidOptionError("address must be that of a running cluster; got None")
                connect(ray, wanted)
                Cluster._joined, Cluster._users = wanted, {self}
            elif self._users and address is not None and wanted != Cluster._joined:
                raise InvalidOptionError(
                    f"this process is connected to the cluster {Cluster._joined!r}, and Ray allows "
                    f"one at a time; close its models before you use {address!r}"
                )
            elif self._users:
                self._users.add(self)

    @property
    def connected(self) -> bool:
        """Whether the connection is there; the program may have ended it by ``ray.shutdown``."""
        there: bool = self.ray.is_initialized()
        if not there:
            self._users.discard(self)  # another connection is not this one's to end
        return there

    def leave(self) -> None:
        """End the connection with its last model. A cluster that was started here ends with it."""
        with self._lock:
            if self in self._users:
                self._users.remove(self)
                if not self._users:
                    self.ray.shutdown()


def connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # reports nothing unless asked to
        options["include_dashboard"] = False
    if address.startswith("ray://"):
        try:
            importlib.import_module("grpc")
        except ImportError as error:
            raise BackendUnavailableError(
                f"address={address!r} is Ray's client, which needs grpcio; pip install "
                "'ray[client]', or run the program on a machine of the cluster and give host:port"
            ) from error
    try:
        if address != LOCAL:  # Ray itself waits for minutes where nothing listens
            socket.create_connection(host_and_port(address), timeout=CONNECT_TIMEOUT).close()
        ray.init(address, **options)
    except OSError as error:
        if address == LOCAL:
            raise
        raise BackendUnavailableError(
            f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`, "
            "give its token in RAY_AUTH_TOKEN if it asks for one, or leave the address out"
        ) from error


def host_and_port(address: str) -> tuple[str, int]:
    where = urlsplit(address if "://" in address else f"//{address}")
    try:
        if where.hostname is not None and where.port is not None:
            return where.hostname, where.port
    except ValueError:  # a port that is no number
        pass
    raise InvalidOptionError(
        f"address must be host:port, or ray://host:port; got {checks.safe_repr(address)}"
    )
