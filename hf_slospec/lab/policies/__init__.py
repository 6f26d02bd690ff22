"""Policies after papers, with the algorithms that only they use; registered by :mod:`hf_slospec.lab`."""
