"""Operators of compiled forwards on a CPU: their library, and the plan that they read."""
