"""Draft trees: building, merging, selecting nodes to verify, and acceptance."""
