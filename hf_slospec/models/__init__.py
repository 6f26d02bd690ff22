"""Real models behind the engine's protocols: packed forwards, KV storage, tree attention, drafters."""
