"""``transformers chat`` of the installed transformers: one message, and an answer must come back.

python benchmarks/clients/run_transformers_chat.py FOLDER --json transformers_chat.json
"""

from __future__ import annotations

import sys

import transformers
from common import MODEL, parse, report, run, server

MESSAGE = "Write a function that adds two numbers."
# The second one answers the question whether to continue, which is asked if the length ended the
# first answer.
TYPED = f"{MESSAGE}\n!exit\n!exit\n"
SHOWN_LINES = 12


def main() -> int:
    work = parse(__doc__, timeout=300)
    with server(work) as url:
        command = [
            sys.executable,
            "-m",
            "transformers.cli.transformers",
            "chat",
            MODEL,
            url,
            "--user",
            "tester",
        ]
        status = run(command, work, "transformers_chat", work.options.timeout, typed=TYPED)
    output = work.log("transformers_chat").read_text(errors="replace")
    _, found, rest = output.partition(f"<{MODEL}>:")
    answer = rest.split("<tester>:")[0].strip()
    error = [line for line in output.splitlines() if "Error" in line or "error" in line]
    checks = {
        "transformers chat ended with status 0": status == 0,
        "an answer came back": bool(found) and bool(answer),
    }
    return report(
        work, "transformers chat", transformers.__version__, checks,
        exit_status=status, answer=answer.splitlines()[:SHOWN_LINES], errors=error[-SHOWN_LINES:],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
