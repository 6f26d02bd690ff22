"""Training of drafters for a user's own target; ``python -m hf_slospec train-drafter`` runs it."""
