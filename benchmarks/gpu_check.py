"""Check a GPU: tests, identity, speed and memory floor, as ``python -m hf_slospec gpu-check`` does.

python benchmarks/gpu_check.py --json benchmarks/results/gpu-check.json
"""

from __future__ import annotations

import typer

from hf_slospec.cli.commands.gpu_check import gpu_check

if __name__ == "__main__":
    typer.run(gpu_check)
