"""Toy models that are exact, and tiny random models, configs and tokenizers of transformers'
classes.
"""
