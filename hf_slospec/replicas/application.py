"""The Ray Serve application. It has two deployments: the front, which takes HTTP requests, and the
model replicas, which decode them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from hf_slospec.replicas.directory import running_replicas
from hf_slospec.replicas.failover import ReplicatedEngine
from hf_slospec.replicas.messages import REPORT_S, keep_replica_on_loopback
from hf_slospec.replicas.options import HEAD, ReplicaOptions
from hf_slospec.replicas.replica import ModelReplica
from hf_slospec.server.access import ServerSettings
from hf_slospec.server.app import make_app
from hf_slospec.server.serve import SWITCH_S

logger = logging.getLogger(__name__)

HEALTH_S = 2.0  # seconds between Serve's health checks of a replica
# Seconds that a replica has to answer a health check; Serve ends it after three without an answer
HEALTH_ANSWER_S = 10.0
# Maximum concurrent calls of one process, never reached: max_queue of the batcher limits requests
MAX_CALLS = 100_000
# Amount of the head node's resource that a front reserves; of any other resource it takes 1
HEAD_SHARE = 1e-3
FRONT = "HTTP"
MODEL = "Model"


class Front:
    """Deployment that takes HTTP requests, tokenizes them, and offers them to replicas."""

    def __init__(self, models: DeploymentHandle, settings: ServerSettings, options: ReplicaOptions):
        sys.setswitchinterval(SWITCH_S)
        keep_replica_on_loopback()
        self.models = models
        self.settings = settings
        self.options = options

    async def __serve_build_asgi_app__(self) -> Any:
        description = await self.models.describe.remote(None)
        work = self.settings.bounds.new_work()
        engine = ReplicatedEngine(self.models, description, running_replicas, self.options, work)
        self.watching = asyncio.ensure_future(_watch(engine))
        return make_app(engine, self.settings)


async def _watch(engine: ReplicatedEngine) -> None:
    while True:
        try:
            await engine.watch()
        except Exception:
            # Continue after any error: without reports, all replicas would count as silent
            logger.exception("the reports of the replicas could not be read; reading them again")
        await asyncio.sleep(REPORT_S)


def app(options: ReplicaOptions) -> Application:
    """Return the Ray Serve application for ``serve.run``, ``serve run`` and Serve's config files.

    Args:
        options: a :class:`ReplicaOptions`, or a dict of its fields, as Serve reads it from a config
            file.

    Raises:
        InvalidInputError: an option is invalid.
    """
    options = ReplicaOptions.of(options)
    resources = {
        "num_cpus": options.cpus,
        "num_gpus": options.gpus or float(options.device.startswith("cuda")),
    }
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.min_replicas,
                initial_replicas=options.replicas,
                max_replicas=options.max_replicas,
                upscale_delay_s=options.upscale_delay_s,
                downscale_delay_s=options.downscale_delay_s,
                policy=AutoscalingPolicy(
                    policy_function="hf_slospec.replicas.autoscaling:by_guarantees"
                ),
            )
        }
    models = serve.deployment(ModelReplica, name=MODEL).options(
        ray_actor_options=resources,
        max_ongoing_requests=MAX_CALLS,
        graceful_shutdown_timeout_s=options.drain_s,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_ANSWER_S,
        request_router_config=RequestRouterConfig(
            request_router_class="hf_slospec.replicas.router.AddressRouter"
        ),
        **scaling,
    )
    share = HEAD_SHARE if options.front_resource == HEAD else 1.0
    front = serve.deployment(serve.ingress()(Front), name=FRONT).options(
        num_replicas=options.fronts,
        ray_actor_options={"num_cpus": 0, "resources": {options.front_resource: share}},
        max_ongoing_requests=MAX_CALLS,
        graceful_shutdown_timeout_s=options.drain_s,
    )
    application: Application = front.bind(models.bind(options), ServerSettings.of(options), options)
    return application
