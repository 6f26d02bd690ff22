"""The decoding engine: its step, its cost model and its interfaces, without torch."""
