"""Replicas under their public name; see :mod:`hf_slospec.replicas`."""

from hf_slospec.replicas import ReplicaOptions, app

__all__ = ["ReplicaOptions", "app"]
