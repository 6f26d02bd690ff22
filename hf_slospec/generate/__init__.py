"""The drop-in for transformers' ``generate``: prepares a call, decodes it, and returns what stock
``generate`` returns.
"""
