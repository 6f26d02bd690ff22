"""Drafters: assistant model, prompt lookup, and the check of a user's own."""
