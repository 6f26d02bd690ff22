"""The support matrix of the documentation, and the classes of it that are tested here one by one."""

from __future__ import annotations

from tests.support.paths import ROOT

SUPPORT = ROOT / "docs" / "support.md"
# Those of test_identity are not tested twice.
EXACT = """Qwen2Moe Qwen3Moe Gemma Phi Olmo Olmo2 Olmo3 Granite SmolLM3 Cohere Cohere2 DeepseekV2 DeepseekV3 Starcoder2
Glm4 Ministral Gemma3n Gemma4""".split()
