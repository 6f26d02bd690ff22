"""``python -m hf_slospec``."""

from hf_slospec.cli import app

app()
