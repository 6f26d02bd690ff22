"""Replicas of the models on Ray Serve, with routing by the SLOs that they can guarantee; needs
``hf_slospec[ray]``.
"""

from hf_slospec.replicas.application import app
from hf_slospec.replicas.options import ReplicaOptions

__all__ = ["ReplicaOptions", "app"]
