"""Measured costs of packed forwards, and the profiles that keep them."""
