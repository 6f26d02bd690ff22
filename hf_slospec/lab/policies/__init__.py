"""Policies after papers, the algorithms that only they use, and their settings."""
