"""Compiled forwards, packed weights and exact forwards on CPUs."""


def register() -> None:
    """Register what this plugin adds to the core."""
    from hf_slospec.cpu.compiled import CompiledPath
    from hf_slospec.model.paths import register_path

    register_path(CompiledPath)
