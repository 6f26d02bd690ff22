"""Packed forwards of transformers models: attention, K/V, sampling and probes."""
