"""Requests: parameters, state, SLOs and metrics."""
