"""The command line and the measurements of its commands."""
