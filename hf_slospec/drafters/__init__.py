"""Drafters: assistant model, prompt lookup, suffix trees, several together, and the check of a user's own."""
