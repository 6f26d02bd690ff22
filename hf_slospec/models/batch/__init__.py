"""Value types of packed batches: tokens, spans, slots and attention rules."""
