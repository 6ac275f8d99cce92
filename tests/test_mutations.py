"""The list of mutations fits the code, so that benchmarks/mutations.py can run it; and that notices
what survives.
"""

import ast

import pytest

from support.commands import CODE
from support.plain import plain_module

mutations, TESTS = plain_module("mutations"), CODE.parent / "tests"
AREAS = {
    "statistics",
    "records",
    "noise",
    "voting",
    "attacks",
    "objectives",
    "training",
    "analysis",
}
SMALL = """
# whole.py: test_whole.py
another sum
- n + 1
+ n - 1
the same sum
- n + 1
+ 1 + n
the same sum, argued
- n + 1
+ 1 + n
survives: addition is commutative
another sum, argued in vain
- (n):
-     return n + 1
+ (n):
+     return n + 2
survives: nobody adds
"""


def test_every_mutation_changes_what_is_there_once_and_names_tests():
    listed = mutations.read_list(mutations.LIST.read_text())
    sources = {each.path: (CODE.parent / each.path).read_text() for each in listed}
    for each in listed:
        ast.parse(each.applied(sources[each.path]))
        assert each.new.split() != each.old.split(), each.fault
        assert each.tests and all((TESTS / name).is_file() for name in each.tests), each.fault
    assert len({(each.file, each.old, each.new) for each in listed}) == len(listed) >= 60
    assert {each.file.partition("/")[0] for each in listed} >= AREAS


@pytest.mark.parametrize("source", ["n + 2", "n + 1 or n + 1"])
def test_text_that_is_not_there_once_is_named(source):
    with pytest.raises(ValueError, match=r"whole\.py has [02] times, not once: n \+ 1"):
        mutations.read_list(SMALL)[0].applied(source)
