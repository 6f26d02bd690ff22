"""The demo: several users of one model, each with a speed target, in a browser."""
