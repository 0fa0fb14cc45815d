"""The connection to Ray. A process has one, which its models share and which ends with the last of
them."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from typing import Any, ClassVar
from urllib.parse import urlsplit

from genlm.core import checks
from genlm.core.errors import BackendUnavailableError, InvalidOptionError

#: The address by which Ray knows a cluster on the same machine.
LOCAL = "local"

#: Seconds to wait for a connection to a cluster's head.
CONNECT_SECONDS = 10.0


class Cluster:
    """Joins a running cluster, or starts one on this machine. If the program is already connected
    to a cluster, that connection is used and never ended.

    Args:
        address: As in ``ray.init``. ``None`` means ``RAY_ADDRESS``; without that, a cluster is
            started.
        may_start: Whether a cluster may be started.

    Raises:
        BackendUnavailableError: there is no cluster at the address.
        InvalidOptionError: this process is connected to another cluster, or no cluster is named.
    """

    _lock = threading.Lock()
    _users: ClassVar[set[Cluster]] = set()  # the address of the connection that this object made
    _joined = ""  # the address that this connection leads to

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
        """Whether the connection still exists. The program may have ended it by
        ``ray.shutdown``."""
        there: bool = self.ray.is_initialized()
        if not there:
            self._users.discard(self)  # another connection is not this object's to end
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
        # No usage statistics, unless the user asks for them.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        if address != LOCAL:  # Ray itself waits for minutes if nothing listens at the address
            socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS).close()
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
    except ValueError:  # the port is not a number
        pass
    raise InvalidOptionError(
        f"address must be host:port, or ray://host:port; got {checks.safe_repr(address)}"
    )
