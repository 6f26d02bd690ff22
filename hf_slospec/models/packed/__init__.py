"""Packed forwards of a model: probes, trial, inputs, padding and graphs."""
