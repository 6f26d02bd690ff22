"""Run the command line interface: ``python -m hf_slospec``."""

from hf_slospec.cli.app import app

app()
