"""Checks that a model can be run in packed forwards: declaration, probe, trial."""
