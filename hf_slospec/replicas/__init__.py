"""Several copies of the models (replicas) behind one HTTP server, on Ray Serve; each request is
routed to a replica that can guarantee its SLOs. Needs ``hf_slospec[ray]``.
"""

from hf_slospec.replicas.application import app
from hf_slospec.replicas.options import ReplicaOptions

__all__ = ["ReplicaOptions", "app"]
