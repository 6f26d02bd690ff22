"""Compiled forwards, packed weights and exact forwards on CPUs."""


def register() -> None:
    """Add the forward path of this plugin to the registry."""
    from hf_slospec.cpu.compiled import CompiledPath
    from hf_slospec.model.paths import register_path

    register_path(CompiledPath)
