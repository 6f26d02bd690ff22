"""Token trees: building, merging, selection and acceptance."""
