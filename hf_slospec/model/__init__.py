"""Packed forwards of transformers models: attention, K/V, forward paths, sampling, and the checks
that a model can be packed.
"""
