"""The demo: several users of one model, each with a speed target, in a browser."""

# Default size of the embedded target: about ten tokens per second and user on two CPU cores
SIZE = "0.1B"
