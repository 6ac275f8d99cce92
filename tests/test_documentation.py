"""The programs in the documentation run as they stand: what a reader copies works."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import CODE

DOCS = CODE.parent / "docs"


def program(text: str) -> str:
    """All Python examples of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def run_program(warm, source: str, folder: Path):
    """Every warning is an error."""
    strict = f"import warnings\nwarnings.simplefilter('error')\n{source}"
    return warm.run([sys.executable, "-c", strict], folder)


@pytest.mark.parametrize(("page", "word"), [("extending", "SmoothedAttack("), ("python", "smoothadv.falsify(")])
def test_examples_of_a_page_are_one_program_that_runs(warm, page, word, tmp_path):
    source = program((DOCS / f"{page}.md").read_text())
    assert source.count("import") > 5 and word in source
    done = run_program(warm, source, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_program_that_fails_is_noticed(warm, tmp_path):
    done = run_program(warm, program("```python\nfrom smoothadv.attacks.pgd import Nothing\n```\n"), tmp_path)
    assert done.returncode == 1 and "Nothing" in done.stderr


def shell_lines(part) -> list[str]:
    """All values of ``run`` in a workflow."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [line for key, one in inner for line in ([one] if key == "run" else shell_lines(one))]


@pytest.mark.parametrize("name", ["Dockerfile", "docs/install.md", "CONTRIBUTING.md", "tests.yml", "release.yml"])
def test_files_that_a_setup_names_are_there(repository, name):
    path = repository / (f".github/workflows/{name}" if name.endswith(".yml") else name)
    text = path.read_text()
    if name.endswith(".yml"):
        content = yaml.safe_load(text)
        lines = shell_lines(content)
        assert lines and all("runs-on" in job or "uses" in job for job in content["jobs"].values())
        assert all((repository / used).is_file() for used in re.findall(r"uses: \./(\S+)", text))
        text = "\n".join(lines)
    named = re.findall(r"(?<![\w/.-])((?:scripts|\.ci|code|benchmarks)/[\w./-]*\w|requirements\.\w+)", text)
    assert named and [one for one in named if not (repository / one).exists()] == []


@pytest.mark.parametrize("template", ["bug", "proposal"])
def test_issue_templates_have_what_a_form_needs(repository, template):
    form = yaml.safe_load((repository / f".github/ISSUE_TEMPLATE/{template}.yml").read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    assert {part["type"] for part in form["body"]} <= {"textarea", "checkboxes"}


def test_citation_names_the_papers_and_no_version_of_its_own(repository):
    """The version has one place, and CITATION.cff is not it."""
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"} and "version" not in citation
    urls = {paper["url"] for paper in citation["references"]}
    assert len(urls) == 2 and all(url in (repository / "README.md").read_text() for url in urls)
