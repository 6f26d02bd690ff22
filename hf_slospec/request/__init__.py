"""Requests: options and parameters, tokens and state, SLOs and metrics."""
