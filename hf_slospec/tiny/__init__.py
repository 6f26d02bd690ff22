"""The embedded pair of models, its inflation to larger sizes, and the loading of models for
commands.
"""
