"""The configurations of hf_slospec that are compared."""

from __future__ import annotations

from hf_slospec.cli.benchmark import OURS
from hf_slospec.config import SLOSpecConfig

# By name of the method; the first is the default.
VARIANTS: dict[str, SLOSpecConfig] = {
    OURS: SLOSpecConfig(),
    f"{OURS}, graphs off": SLOSpecConfig(cuda_graphs=False),
    f"{OURS}, flash": SLOSpecConfig(attention="flash"),
    f"{OURS}, sdpa": SLOSpecConfig(attention="sdpa"),
    f"{OURS}, fixed tree": SLOSpecConfig(policy="fixed"),
    f"{OURS}, no drafts": SLOSpecConfig(policy="none"),
}
