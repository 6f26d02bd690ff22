"""Layers that keep a state instead of K and V: convolutions, linear attention and state spaces, in packed forwards."""
