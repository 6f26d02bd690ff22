"""Algorithms on arrays: no model, no clock, no transformers."""
