"""HTTP server with OpenAI's APIs (completions, chats, responses) and Anthropic's Messages API."""
