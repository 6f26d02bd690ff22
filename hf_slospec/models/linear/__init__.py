"""Linear layers: weights packed for faster CPU kernels."""
