"""The drop-in for transformers' generate: prepare a call, decode it, return what stock returns."""
