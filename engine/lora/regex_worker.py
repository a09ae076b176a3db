"""Matches regular expressions against module names, also as a process of its own.

An adapter's author chooses the expressions, and a hostile one can run for years while holding the
interpreter lock; only a process can be stopped. Uses the standard library alone, so that the
process starts in milliseconds.
"""

import json
import re
import sys
from typing import Literal

How = Literal["match", "fullmatch"]


def match_names(regexes: list[tuple[How, str]], names: list[str]) -> list[list[str | None]]:
    """For each expression and name: None, or what the group ``idx`` matched ("" without one)."""
    results: list[list[str | None]] = []
    for how, pattern in regexes:
        compiled = re.compile(pattern)
        matcher = compiled.fullmatch if how == "fullmatch" else compiled.match
        found = [matcher(name) for name in names]
        results.append([match and (match.groupdict().get("idx") or "") for match in found])
    return results


def main() -> None:
    """Read expressions and names as JSON from stdin, write the matches to stdout."""
    regexes, names = json.load(sys.stdin)
    try:
        answer: object = match_names(regexes, names)
    except (re.error, RecursionError, OverflowError) as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
