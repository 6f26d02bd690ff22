"""Policies: who gets how much of each step."""
