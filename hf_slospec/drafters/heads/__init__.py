"""Networks of trained drafters, which read hidden states of the target."""
