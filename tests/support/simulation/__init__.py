"""Deterministic simulation of the batcher under faults, each schedule from one seed."""
