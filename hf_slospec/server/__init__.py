"""HTTP server with OpenAI's interface."""
