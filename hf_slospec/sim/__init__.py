"""Simulated models and a virtual clock under the real engine, schedulers and policies."""
