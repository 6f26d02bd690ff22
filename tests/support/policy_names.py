"""Names of all policies; importing this registers those of the lab, where entry points of the
package are missing.
"""

from __future__ import annotations

import hf_slospec.lab  # noqa: F401  in a checkout that is not installed, or was installed before there were any
from hf_slospec.policies.registry import all_policies

POLICIES = tuple(all_policies())
