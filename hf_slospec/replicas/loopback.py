"""Restriction of Ray to the loopback interface; it would otherwise listen on all interfaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants

LOOPBACK = "127.0.0.1"


@contextmanager
def on_loopback() -> Iterator[str]:
    """Let ``ray.init`` in a ``with`` block take loopback addresses as they are, and yield that of a local node.

    Ray binds its ports to the address of the node. It would replace a loopback address by one that other machines can
    reach, except on systems where Ray has no clusters.
    """
    is_cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster


def keep_replica_on_loopback() -> None:
    """Keep the port of this process's Serve replica on the loopback interface, if the node has that address.

    Serve calls the constructor of a deployment first and then opens the port, on all interfaces.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: Any, address: str) -> int:
        port: int = bind(server, address.replace("[::]", LOOPBACK))
        return port

    replica.add_port_to_grpc_server = bind_to_loopback
