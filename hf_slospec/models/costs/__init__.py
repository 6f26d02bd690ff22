"""Measured costs of packed forwards, and their profiles on disk."""
