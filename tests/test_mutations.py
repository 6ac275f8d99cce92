"""The list of mutations fits the code, so that benchmarks/mutations.py can run it; and that notices
what survives.
"""

import ast
import importlib
import sys
from types import ModuleType

import pytest

from support.commands import CODE, run_process

BENCHMARKS, TESTS = CODE.parent / "benchmarks", CODE.parent / "tests"
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
RUN = """
import hypothesis, mutations, pathlib, pytest
listed = mutations.read_list(pathlib.Path("list.txt").read_text())
print([each.fault for each in mutations.unexpected_outcomes(listed, pathlib.Path.cwd())])
"""


@pytest.fixture
def mutations(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mutations")


def test_every_mutation_changes_what_is_there_once_and_names_tests(mutations):
    listed = mutations.read_list(mutations.LIST.read_text())
    for each in listed:
        source = (CODE.parent / each.path).read_text()
        assert ast.dump(ast.parse(each.applied(source))) != ast.dump(ast.parse(source)), each.fault
        assert each.tests and all((TESTS / name).is_file() for name in each.tests), each.fault
    assert len({(each.file, each.old, each.new) for each in listed}) == len(listed) >= 60
    assert {each.file.partition("/")[0] for each in listed} >= AREAS


@pytest.mark.parametrize("source", ["n + 2", "n + 1 or n + 1"])
def test_text_that_is_not_there_once_is_named(mutations, source):
    with pytest.raises(ValueError, match=r"whole\.py has [02] times, not once: n \+ 1"):
        mutations.read_list(SMALL)[0].applied(source)


@pytest.mark.parametrize(
    "text",
    ["# a.py: b.py\nno change\n", "# a.py: b.py\nno text\n- x\n", "# a.py: b.py\n- x\n+ y\n"],
)
def test_list_with_anything_else_in_it_is_refused(mutations, text):
    with pytest.raises(ValueError, match=r"a\.py are not written"):
        mutations.read_list(text)


def test_survivors_without_a_reason_and_reasons_without_a_survivor_are_found(tmp_path):
    package = tmp_path / "code" / "smoothadv"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "whole.py").write_text("def following(n):\n    return n + 1\n")
    (tmp_path / "tests").mkdir()
    test = (
        "from smoothadv.whole import following\n\n\ndef test_it():\n    assert following(1) == 2\n"
    )
    (tmp_path / "tests" / "test_whole.py").write_text(
        f"import sys\nsys.path.insert(0, 'code')\n{test}"
    )
    (tmp_path / "list.txt").write_text(SMALL)
    done = run_process([sys.executable, "-c", RUN], tmp_path, PYTHONPATH=str(BENCHMARKS))
    *table, unexpected = done.stdout.splitlines()
    assert unexpected == "['the same sum', 'another sum, argued in vain']", done.stderr
    verdicts = [row.split(" | ")[2] for row in table[2:]]
    killed = "test_whole.py::test_it"
    assert verdicts == [killed, "**survives**", "survives: addition is commutative", killed]
    assert (package / "whole.py").read_text().endswith("return n + 1\n"), "nothing stays mutated"


def test_tests_that_do_not_exist_kill_nothing(tmp_path):
    program = (
        "import mutations, pathlib; mutations.run_tests(pathlib.Path.cwd(), ['test_nothing.py'])"
    )
    done = run_process([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(BENCHMARKS))
    assert done.returncode == 1 and "RuntimeError: test_nothing.py cannot be run" in done.stderr
