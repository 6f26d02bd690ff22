"""Slow and plain forms of what the package computes, which its results are compared with."""
