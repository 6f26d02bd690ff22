"""Names of all policies; importing this registers those of the lab, where entry points of the
package are missing.
"""

from __future__ import annotations

from hf_slospec.policies.registry import all_policies
from tests.support.blocked import BLOCKED

if "lab" not in BLOCKED:
    # In a checkout that is not installed, or was installed before there were entry points.
    import hf_slospec.lab  # noqa: F401

POLICIES = tuple(all_policies())
