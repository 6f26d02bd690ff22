"""Networks of trained drafting heads, which read hidden states of the target, and their loading."""
