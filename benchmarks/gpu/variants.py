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

# Constant drafts, which are timed if they are named: chains, and trees of so many nodes.
CONSTANTS: dict[str, SLOSpecConfig] = {
    f"{OURS}, {name}": SLOSpecConfig(policy="fixed", max_depth=depth, max_width=width)
    for name, depth, width in (
        ("chain of 2", 2, 1),
        ("chain of 4", 4, 1),
        ("chain of 8", 8, 1),
        ("chain of 16", 16, 1),
        ("tree of 8", 4, 2),
        ("tree of 16", 4, 4),
    )
}
CONFIGS = VARIANTS | CONSTANTS
