"""The decoding engine: requests, policies and the step, without torch."""
