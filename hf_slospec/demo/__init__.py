"""The demo: several users of one model, each with an SLO, in a browser; and a race
against stock ``generate``.
"""

# Default size of the embedded target: about ten tokens per second and user on two CPU cores
SIZE = "0.1B"
