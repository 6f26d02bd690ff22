"""K/V of one engine's requests in a model's cache, and prefix caching."""
