"""Compare a model with stock ``generate``: tokens, speed and K/V, as a report for an issue.

    python scripts/check_model.py org/name --assistant org/draft --dtype float32

The same as ``python -m hf_slospec check``.
"""

import typer

from hf_slospec.cli.commands.check import check

if __name__ == "__main__":
    typer.run(check)
