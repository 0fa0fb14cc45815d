"""AsyncRayLM: one model, many replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from genlm.core.lm import NamedLM


class AsyncRayLM(NamedLM):
    """A language model that several replicas evaluate; use :meth:`from_name` to create one."""

    @classmethod
    def from_name(
        cls,
        model_id: str,
        backend: str = "hf",
        replicas: int = 2,
        backend_opts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Start the replicas, or join those of a named fleet, and wait until all are loaded.

        Args:
            model_id: A folder or a hub name, as the inner backend takes it on its node.
            backend, replicas, backend_opts, **options: The options of the backend
                (:class:`~genlm.ray.options.RayOptions`), and those of every backend.

        Raises:
            BackendUnavailableError: Ray is not installed, or the replicas did not start in time.
            InvalidOptionError: an option is not accepted.
            Exception: what the inner backend raised while it loaded the model.
        """
        from genlm.ray.options import capturing_group

        ours = {"backend": backend, "replicas": replicas, "backend_opts": backend_opts}
        group = capturing_group() if options.get("name") is None else None
        if group is not None:  # in a task of Ray, only this thread knows the placement group
            options["resources"] = {"placement": group, **(options.get("resources") or {})}
        return cls.from_backend("ray", model_id, {**ours, **options})
