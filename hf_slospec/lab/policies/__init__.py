"""Policies after papers, and the algorithms that only they use; registered by
:mod:`hf_slospec.lab`.
"""
