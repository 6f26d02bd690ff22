"""Serving systems by name: settings of policy, admission and prefill."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError, describe_validation_error

UNCHUNKED: dict[str, Any] = dict(admission="fcfs", prefill="first", prefill_chunk=8192, max_batch=256)
CHUNKED: dict[str, Any] = dict(admission="fcfs", prefill="chunked", prefill_chunk=2048, max_batch=256)
# B = 256 reproduces the paper's figure 8 under the simulator's latencies; the artifact has 512, see docs/papers.md.
ADASERVE: dict[str, Any] = dict(
    policy="adaserve", max_depth=8, max_width=3, token_budget=256, draft_budget=96,
    admission="fcfs", prefill="first", prefill_chunk=1024, max_batch=64,
)  # fmt: skip

ORACLE, ADASERVE_ORACLE = "oracle", "adaserve-oracle"  # their policies need the texts, so no config can name them
SYSTEMS: dict[str, dict[str, Any]] = {
    "auto": {},
    ORACLE: {},
    "vllm": dict(policy="none", **UNCHUNKED),
    "vllm-priority": dict(policy="none", **{**UNCHUNKED, "admission": "priority"}),
    "vllm-spec2": dict(policy="fixed", max_depth=2, max_width=1, **UNCHUNKED),
    "vllm-spec4": dict(policy="fixed", max_depth=4, max_width=1, **UNCHUNKED),
    "vllm-spec6": dict(policy="fixed", max_depth=6, max_width=1, **UNCHUNKED),
    "vllm-spec8": dict(policy="fixed", max_depth=8, max_width=1, **UNCHUNKED),
    "vllm-adaptive": dict(policy="vllm-adaptive", max_depth=7, max_width=1, **UNCHUNKED),
    "sarathi": dict(policy="none", **CHUNKED),
    "adaserve": ADASERVE,
    ADASERVE_ORACLE: ADASERVE,
    "smartspec": dict(policy="smartspec", max_depth=8, max_width=1, **UNCHUNKED),
    "turbospec": dict(policy="turbospec", max_depth=8, max_width=1, **UNCHUNKED),
    "adaspec": dict(policy="adaspec", max_depth=8, max_width=1, **UNCHUNKED),
    # The paper's TPOT SLOs are those of every window of ten tokens.
    "slos-serve": dict(policy="slos-serve", max_depth=8, max_width=1, admission="slo", guarantee=0.9),
}


def config_of(system: str) -> SLOSpecConfig:
    """Return the config of a name, of a name with other settings (``auto {"max_depth": 4}``), or of settings alone.

    Raises:
        InvalidInputError: there is no such system, or the settings are invalid.
    """
    name, brace, settings = system.partition("{")
    name = name.strip()
    if name not in SYSTEMS and (name or not brace):
        raise InvalidInputError(f"unknown system {name!r}; known are: {', '.join(SYSTEMS)}")
    try:
        given = json.loads(brace + settings) if brace else {}
        return SLOSpecConfig.model_validate({**SYSTEMS.get(name, {}), **given})
    except json.JSONDecodeError as error:
        column = system.index("{") + error.colno
        raise InvalidInputError(f"system {system!r}: column {column}: {error.msg}") from error
    except ValidationError as error:
        raise InvalidInputError(f"system {system!r}: {describe_validation_error(error)}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
        raise InvalidInputError(f"system {system[:40]!r}: {error}") from error


def is_oracle(system: str) -> bool:
    """Return whether the system is an oracle, with or without other settings."""
    return system.partition("{")[0].strip() in (ORACLE, ADASERVE_ORACLE)
