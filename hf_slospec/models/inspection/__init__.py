"""Properties of a model that packed forwards depend on, and detection of changes to them."""
