"""The in-process batcher: threads submit requests, and one thread decodes them together."""
