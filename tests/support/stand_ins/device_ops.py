"""Counts of what a stand-in device is asked to do."""

from __future__ import annotations

import contextlib
from unittest import mock

from tests.support.stand_ins.cuda import Graph
from tests.support.stand_ins.cuda_tensors import Device, OnDevice
from tests.support.stand_ins.graphs import tensors_in

REPLAY = "replay"  # a whole graph's
NO_WORK = (
    "empty",
    "detach",
    "record_stream",
    "lift_fresh",
    "alias",
    "_unsafe_view",
)  # parts of names


@contextlib.contextmanager
def device_operations():
    """Names of the operations that the device is given within, copies included and views not."""
    names = []
    run = Device.run
    index = Device.index
    replay = Graph.replay
    is_replaying = False

    def noted_run(self, func, args, kwargs):
        out = run(self, func, args, kwargs)
        name = str(func)
        tensors = [*tensors_in(args), *tensors_in(kwargs), *tensors_in(out)]
        is_here = any(type(tensor) is OnDevice for tensor in tensors)
        if (
            is_here
            and not is_replaying
            and not is_view(func)
            and not any(own in name for own in NO_WORK)
        ):
            names.append(name)
        return out

    def noted_index(self, func, args):
        has_indices = any(tensor.ndim for tensor in tensors_in(args[1]))
        if type(args[0]) is OnDevice and not is_replaying and (has_indices or len(args) > 2):
            names.append(func.__name__)
        return index(self, func, args)

    def noted_replay(self):
        nonlocal is_replaying
        names.append(REPLAY)
        is_replaying = True
        try:
            replay(self)
        finally:
            is_replaying = False

    with (
        mock.patch.object(Device, "run", noted_run),
        mock.patch.object(Device, "index", noted_index),
        mock.patch.object(Graph, "replay", noted_replay),
    ):
        yield names


def is_view(func):
    returned = [own.alias_info for own in getattr(func, "_schema").returns]  # noqa: B009  not public
    return any(alias is not None and not alias.is_write for alias in returned)


def between_replays(names):
    """The operations before the first replay, between each two, and after the last."""
    groups = [[]]
    for name in names:
        if name == REPLAY:
            groups.append([])
        else:
            groups[-1].append(name)
    return groups
