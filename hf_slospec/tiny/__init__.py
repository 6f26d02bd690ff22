"""The embedded pair of small models, and its inflation to larger sizes.

Commands load models by ``hf_slospec.server.loading``.
"""
