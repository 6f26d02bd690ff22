"""K/V storage of one model's sequences."""
