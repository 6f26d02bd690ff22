"""Schedulers: which requests a step decodes and which prompts it prefills."""
