"""The server on Ray Serve: replicas of one model, each an engine behind the application of ``specdec serve``.

``serve run specdec_ext.cluster.replicas:application model=bundled replicas=2``, or the same path as
``import_path`` in a configuration file. Ray Serve's proxy listens, spreads requests over the replicas, and
starts new ones in place of those that have died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from specdec_ext.cluster.options import EngineOptions
from specdec_ext.preflight.extras import require
from specdec_ext.serve.app import create_app
from specdec_ext.serve.service import Settings

# Requests that a replica takes beyond those that it decodes; more wait in Ray Serve's proxy.
_WAITING_PER_ROW = 1
# Seconds that a replica has to finish its requests when it is removed.
_SHUTDOWN_SECONDS = 600.0


@dataclass(frozen=True)
class ReplicaOptions(EngineOptions):
    """The options of the application.

    Attributes:
        replicas: number of replicas; with ``max_replicas``, the number at the start and the least.
        max_replicas: the most replicas; None for a fixed number.
        cpus, gpus: what Ray reserves for each replica.
        target_ongoing_requests: number of requests per replica that autoscaling aims at; None for
            ``max_rows``, with which every row of an engine has work.
        served_model_name, chat_template, api_key, max_body_bytes, request_timeout: as for ``specdec serve``;
            the template is its text.
    """

    replicas: int = 1
    max_replicas: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    target_ongoing_requests: float | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    api_key: str | None = None
    max_body_bytes: int = Settings.max_body_bytes
    request_timeout: float = Settings.request_timeout

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; expected at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; expected at least replicas={self.replicas}"
            )

    @property
    def settings(self) -> Settings:
        """The options of each replica's server."""
        return Settings(
            model_name=self.served_model_name or self.model,
            chat_template=self.chat_template,
            api_key=self.api_key,
            max_body_bytes=self.max_body_bytes,
            request_timeout=self.request_timeout,
        )

    @property
    def scale(self) -> dict[str, Any]:
        """The arguments of ``ray.serve.deployment`` that say how many replicas there are."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        autoscaling = {
            "min_replicas": self.replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests or self.max_rows,
        }
        return {"autoscaling_config": autoscaling}


class Replica:
    """One replica: an engine, and the server's application on it.

    Args:
        options: the options of the application.
    """

    def __init__(self, options: ReplicaOptions):
        self._engine, self._settings = options.start(), options.settings

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray Serve: the application, which shuts the engine down when the replica ends."""
        return create_app(self._engine, self._settings)

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica for which this raises an error."""
        if not self._engine.is_open:
            raise RuntimeError("the engine has ended")


def application(args: Mapping[str, Any]) -> Any:
    """Build the application for ``serve run`` and ``serve.run``.

    Args:
        args: values of :class:`ReplicaOptions` by name; texts, as ``serve run`` passes them, are read as
            numbers where numbers are expected.

    Returns:
        A ``ray.serve.Application``.

    Raises:
        ValueError: for an option that is unknown or wrong.
        ImportError: Ray Serve is not installed.
    """
    serve: Any = require("ray.serve", "specdec_ext.cluster.replicas")
    options = _options(args)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="specdec",
        max_ongoing_requests=options.max_rows * (1 + _WAITING_PER_ROW),
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        **options.scale,
    )
    return deployment.bind(options)


def _options(args: Mapping[str, Any]) -> ReplicaOptions:
    try:
        return TypeAdapter(ReplicaOptions).validate_python(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        where = f"{name}: " if name else ""
        known = sorted(field.name for field in fields(ReplicaOptions))
        raise ValueError(
            f"{where}{first['msg'].removeprefix('Value error, ')}; the options are {', '.join(known)}"
        ) from error
