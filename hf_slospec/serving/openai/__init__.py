"""The package of the HTTP server with OpenAI's interface."""
