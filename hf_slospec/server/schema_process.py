"""Program that checks that a JSON schema can be compiled, under resource limits of the operating
system.

llguidance's own limits do not bound the time and memory for every schema, and a thread cannot be
stopped. ``schemas.py`` runs the program by its path, so that it imports nothing of this package,
which would take seconds. Standard input: JSON with ``schema`` and ``options``. Standard output: the
reason why the schema cannot be compiled; empty if it can."""

import json
import os
import resource
import sys


def main() -> None:
    """Check that the schema on standard input can be compiled. The program's two arguments are the
    maximum CPU time in seconds and the maximum memory in bytes.
    """
    seconds, memory = map(int, sys.argv[1:])
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # one second more to start Python
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 1))
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
