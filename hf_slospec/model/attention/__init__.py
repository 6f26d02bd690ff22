"""Tree attention for packed batches, plugged into transformers' attention interface."""
