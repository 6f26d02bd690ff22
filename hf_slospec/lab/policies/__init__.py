"""Policies reimplemented from papers, and the algorithms that only these policies use.

:mod:`hf_slospec.lab` registers them. ``[FIX]`` marks deviations from the paper or released code.
"""
