"""Start of a server with replicas from the command line: in a local Ray, or in the cluster that
RAY_ADDRESS names. ``application.py`` has the deployments.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from transformers import AutoConfig, AutoTokenizer

from hf_slospec.drafters.checkpoint import LOADING_ERRORS
from hf_slospec.errors import InvalidInputError, NotRunningError
from hf_slospec.model.loading import hub_options
from hf_slospec.model.machine import available_cores
from hf_slospec.replicas.application import app
from hf_slospec.replicas.messages import on_loopback
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.server.loading import check_drafter
from hf_slospec.server.options import ServeOptions, ServerOptions
from hf_slospec.server.serve import requests_to_try

APP = "hf_slospec"
EVERY_ADDRESS = ("0.0.0.0", "::")  # hosts that mean all network interfaces
OBJECT_STORE_BYTES = 100 * 2**20  # for a local Ray; little, as requests and tokens are small
FRONT_CPUS = 1  # CPUs of a local Ray besides those of replicas


def replica_options(options: ServeOptions, replicas: int) -> ReplicaOptions:
    """Return the options of ``hf_slospec serve --replicas``; in a local Ray, replicas share the
    cores equally.

    Raises:
        InvalidInputError: an option is invalid.
    """
    is_local = "RAY_ADDRESS" not in os.environ
    cores = available_cores()
    common = {name: getattr(options, name) for name in ServerOptions.model_fields} | {
        "allowed_hosts": options.hosts
    }
    return ReplicaOptions(
        **common,
        replicas=replicas,
        cpus=(cores / replicas if replicas > cores else cores // replicas) if is_local else 1.0,
        threads=max(cores // replicas, 1) if is_local else None,
    )


@contextmanager
def served(options: ReplicaOptions, host: str, port: int, root_path: str = "") -> Iterator[str]:
    """Serve inside the context, and yield the address; at the end, finish the requests in progress.

    A local Ray that this function started is stopped at the end; a cluster keeps running without
    the application. If Serve already runs in the cluster, it keeps its address, and ``host`` and
    ``port`` have no effect.

    Raises:
        InvalidInputError: a model cannot be found.
        OSError: another process listens at the port.
        NotRunningError: the replicas could not be started.
    """
    is_joined = "RAY_ADDRESS" in os.environ
    is_ours = not ray.is_initialized()
    if is_ours and not is_joined:
        _check_here(options, host, port)
    folder = _join_or_start(options) if is_ours else None
    try:
        # Proxies on other machines could not listen at one address of this machine, and Serve would
        # restart them forever.
        location = "EveryNode" if host in EVERY_ADDRESS else "HeadOnly"
        serve.start(location, {"host": host, "port": port, "root_path": root_path})
        try:
            serve.run(app(options), name=APP)
        except RuntimeError as error:
            raise NotRunningError(f"the replicas could not be started: {error}") from error
        try:
            yield f"http://{host}:{port}"
        finally:
            serve.delete(APP)
    finally:
        if is_ours:
            if not is_joined:
                serve.shutdown()
            ray.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # kept after an error: its logs may say why


def _check_here(options: ReplicaOptions, host: str, port: int) -> None:
    """Check that models and drafter can be found and the port is free; in the processes of a local
    Ray, errors would appear only after a minute.
    """
    for name in (options.target, options.assistant):
        if name is not None:
            try:
                AutoConfig.from_pretrained(name, **hub_options(name))
            except (OSError, ValueError) as error:
                raise InvalidInputError(f"{name}: {error}") from error
    check_drafter(options)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(
                f"cannot listen at {host}, port {port}: {error.strerror}; choose another port"
            ) from error


def _is_chat(options: ReplicaOptions) -> bool:
    """Return True if the model has a chat template; False also if its tokenizer is not on this
    machine.
    """
    if options.chat_template is not None or options.target is None:
        return options.chat_template is not None
    try:
        return (
            AutoTokenizer.from_pretrained(options.target, local_files_only=True).chat_template
            is not None
        )
    except LOADING_ERRORS:  # the path may exist on the cluster's machines only
        return False


def _join_or_start(options: ReplicaOptions) -> str | None:
    """Start a local Ray and return its folder, or join RAY_ADDRESS's cluster and return None."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # On a busy machine a proxy may not be ready after 5 s; Serve's controller then ends it and does
    # not try again.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    if "RAY_ADDRESS" in os.environ:
        with on_loopback():  # RAY_ADDRESS may be a loopback address
            ray.init(log_to_driver=False)
        return None
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of Unix sockets must be short
    with on_loopback() as address:
        ray.init(
            address="local",
            num_cpus=math.ceil(options.replicas * options.cpus) + FRONT_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=address,
            _temp_dir=folder,
        )
    return folder


def serve_replicas(options: ServeOptions, replicas: int, say: Callable[[str], None]) -> None:
    """Serve with replicas until SIGINT or SIGTERM, and finish the requests in progress.

    Raises:
        InvalidInputError: an option is invalid.
    """
    replicated = replica_options(options, replicas)
    ended = threading.Event()
    ray_name = os.environ.get("RAY_ADDRESS", "a local Ray")
    say(f"starting {replicas} replicas of {replicated.name} on {ray_name}; this takes a minute")
    with served(replicated, options.host, options.port, options.root_path) as url:
        lines = requests_to_try(replicated, f"{url}/v1", _is_chat(replicated), 0.1)
        say("\n".join((f"address  {url}/v1", *lines)))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        say("finishing the requests in progress")
