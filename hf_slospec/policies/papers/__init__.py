"""Policies published in papers, with the algorithms and options that only they use."""
