"""The in-process batcher: submit requests from any thread, decode them together."""
