"""Runs in every notebook's kernel before its cells while the site is built: no compiler is started
beside them.

It would go on after the notebook, for a package that nobody uses again.
"""

from hf_slospec.cpu import compiled

compiled.START_S = float("inf")
