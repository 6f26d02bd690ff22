"""The demo: several users of one model, each with a speed of their own, in a browser."""
