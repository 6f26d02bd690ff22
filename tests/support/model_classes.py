"""The support matrix of the documentation, and the classes of it that are tested here one by one."""

from __future__ import annotations

import re
from collections import Counter

from tests.support.paths import ROOT

SUPPORT = ROOT / "docs" / "support.md"
# Those of test_equals_stock are not tested twice.
EXACT = """Qwen2Moe Gemma Olmo3 Granite Cohere2 DeepseekV2 DeepseekV3 Starcoder2 Ministral Gemma3n Gemma4""".split()


def support_counts(text=None):
    """Return the numbers of the table at the top of the support page, by column and status."""
    if text is None:
        text = SUPPORT.read_text(encoding="utf-8")
    header, _, *rows = re.findall(r"^\|.*\|$", text.split("\n| class |")[0], re.MULTILINE)
    columns = [cell.strip() for cell in header.strip("|").split("|")][1:]
    found = {column: Counter() for column in columns}
    for row in rows:
        status, *numbers = (cell.strip() for cell in row.strip("|").split("|"))
        for column, number in zip(columns, numbers, strict=True):
            found[column][status] = int(number)
    return found
