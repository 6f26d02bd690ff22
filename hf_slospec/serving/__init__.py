"""Public path of the replicas."""
