"""The demo: several users of one model, each with an own speed target, in a browser."""
