"""Program that checks that a JSON schema can be compiled, under resource limits of the operating
system.

llguidance's own limits do not bound the time and memory of every schema, and a thread cannot be
stopped. The program is run by its path, so that it imports nothing of this package, whose import
takes seconds. Standard input: JSON with ``schema`` and ``options``. Standard output: why it cannot
be compiled; empty if it can."""

import json
import os
import resource
import sys


def main() -> None:
    """Check that the schema of standard input can be compiled, within seconds and bytes that the
    arguments give.
    """
    seconds, memory = map(int, sys.argv[1:])
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(
        resource.RLIMIT_CPU, (seconds + 1, seconds + 1)
    )  # one second more to start Python
    from llguidance import LLMatcher

    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    job = json.load(sys.stdin)
    try:
        grammar = LLMatcher.grammar_from_json_schema(job["schema"], overrides=job["options"])
        sys.stdout.write(LLMatcher.validate_grammar(grammar))
    except ValueError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main()
