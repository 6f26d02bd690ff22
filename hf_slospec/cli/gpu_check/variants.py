"""Which of our configurations are compared."""

from __future__ import annotations

from hf_slospec.cli.benchmark import OURS
from hf_slospec.config import SLOSpecConfig

# By the name of the contestant; the first is what a user gets. A config is one more line.
VARIANTS: dict[str, SLOSpecConfig] = {
    OURS: SLOSpecConfig(),
    f"{OURS}, sdpa": SLOSpecConfig(attention="sdpa"),
    f"{OURS}, flash": SLOSpecConfig(attention="flash"),
    f"{OURS}, graphs off": SLOSpecConfig(cuda_graphs=False),
}
