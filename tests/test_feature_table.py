# SPDX-License-Identifier: Apache-2.0
"""README's feature table and the tests' ``feature`` markers say the same.

That a marked test has seen rings, or has not, is checked in ``conftest``.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTCOMES = {
    "not yet run on a GPU",
    "works",
    "works (scheduler)",
    "works (planner)",
    "works (pickling)",
    "passes through",
    "refused",
}


def table(readme: str) -> dict[str, tuple[str, set[str]]]:
    """Feature -> (outcome, tests) of the rows ``| feature | outcome | tests |``."""
    (body,) = re.findall(r"<!-- features -->\n(.*?)<!-- /features -->", readme, re.S)
    rows = {}
    for line in body.strip().splitlines()[2:]:
        feature, outcome, tests = (cell.strip() for cell in line.strip("| ").split("|"))
        assert feature not in rows, f"two rows for {feature!r}"
        rows[feature] = outcome, set(re.findall(r"`(test_\w+)`", tests))
    return rows


def markers(sources: list[str]) -> dict[str, tuple[str, set[str]]]:
    """The same of ``@pytest.mark.feature(feature, outcome)`` on test functions."""
    found: dict[str, tuple[str, set[str]]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            for decorator in getattr(node, "decorator_list", ()):
                call = ast.unparse(decorator)
                if not call.startswith("pytest.mark.feature("):
                    continue
                feature, outcome = (ast.literal_eval(a) for a in decorator.args)
                assert outcome in OUTCOMES, call
                tests = found.setdefault(feature, (outcome, set()))
                assert tests[0] == outcome, f"two outcomes for {feature!r}"
                tests[1].add(node.name)
    return found


def all_sources() -> list[str]:
    return [p.read_text() for p in sorted((ROOT / "tests").glob("test_*.py"))]


def test_readme_lists_what_the_tests_show():
    rows = table((ROOT / "README.md").read_text())
    assert rows == markers(all_sources())
    assert len(rows) > 30


def test_a_row_without_its_test_is_noticed():
    readme = (ROOT / "README.md").read_text()
    sources = [
        s.replace('"beam search", "works"', '"beam search", "refused"')
        for s in all_sources()
    ]
    assert table(readme) != markers(sources)
    assert table(readme.replace("test_beam_search", "test_gone")) != markers(
        all_sources()
    )
