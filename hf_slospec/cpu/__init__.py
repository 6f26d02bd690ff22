"""Compiled forwards, packed weights and exact forwards on CPUs."""
