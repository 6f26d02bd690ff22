"""Elementwise layers of packed forwards as one kernel each."""
