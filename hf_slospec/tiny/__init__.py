"""The embedded pair, its inflation to larger sizes, and loading of models for commands."""
