"""Drafters: assistant models, trained heads, prompt lookup, suffix trees, hybrids of these, and
users' drafters.
"""
