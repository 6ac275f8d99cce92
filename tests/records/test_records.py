"""What is written: files that are whole or not there, radii that are never rounded up, manifests
that explain.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from importlib import metadata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import smoothadv
from smoothadv.base.files import write_atomically, write_json, write_text
from smoothadv.base.provenance import provenance
from smoothadv.records.logs import format_radius, tsv
from support.commands import run_process


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False))
@example(1e6)
@example(1.9057)  # the released code prints this radius as 1.91
@example(0.1)  # as a float, a little more than a tenth
@example(5e-324)
@example(sys.float_info.max)
def test_printed_radius_is_never_the_larger_and_hardly_the_smaller(radius):
    printed, exact = Decimal(format_radius(radius)), Decimal(radius)
    assert printed <= exact
    assert (exact - printed) / exact < Decimal("1e-15")
    assert float(format_radius(radius)) == radius, "nor is it another when it is read"
    assert set(format_radius(radius)) <= set("0123456789."), "there is no exponent"
    assert format_radius(0.0) == "0.0", "of an abstention, as in released logs"


def test_table_is_a_header_and_a_line_per_row_in_the_order_of_the_columns():
    assert (
        tsv(("b", "a"), [{"a": 1, "b": "x"}, {"a": 2.5, "b": "y", "c": 0}])
        == "b\ta\nx\t1\ny\t2.5\n"
    )


def test_file_is_written_whole_and_readers_see_the_old_one_until_then(
    tmp_path,
):
    path = tmp_path / "a" / "b" / "file.bin"
    write_atomically(path, lambda file: file.write(b"\x00old"))
    assert path.read_bytes() == b"\x00old" and list(path.parent.iterdir()) == [path]

    def write(file):
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"\x00old"

    write_atomically(path, write)
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("old", [{}, {"file": b"old"}])
def test_failure_midway_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, error, call, old):
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)

    def fail(*arguments):
        raise error

    def write(file):
        file.write(b"half of the n")
        file.flush()
        if call == "write":
            fail()

    if call != "write":
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(error):
        write_atomically(tmp_path / "file", write)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old


def test_new_content_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    calls = []
    synchronise, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), synchronise(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert calls[:2] == ["fsync", "replace"]


def test_text_and_json_are_written_in_utf_8_with_a_final_newline(tmp_path):
    write_text(tmp_path / "text", "σ = 0.25\n")
    assert (tmp_path / "text").read_bytes() == "σ = 0.25\n".encode()
    write_json(tmp_path / "json", {"sigma": 0.25, "model": "modèle"})
    assert (tmp_path / "json").read_text().endswith("}\n")
    assert json.loads((tmp_path / "json").read_text()) == {"sigma": 0.25, "model": "modèle"}


def test_provenance_is_command_versions_and_start(monkeypatch):
    command = ["certify.py", "digits", "model with a space.tar", "0.25"]
    monkeypatch.setattr(sys, "argv", command)
    record = provenance()
    assert record["command"] == command and provenance(["certify", "x"])["command"] == [
        "certify",
        "x",
    ]
    assert record["smoothadv"] == smoothadv.__version__
    assert record["python"] == platform.python_version()
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy", "scipy")}
    assert record["packages"].items() >= versions.items()
    assert "git_commit" in record
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(record["started"])) < timedelta(
        minutes=1
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "abc", "--N", "100"], ["--hf-token", "***", "--N", "100"]),
        (["--API_KEY=abc", "--password=a b"], ["--API_KEY=***", "--password=***"]),
        (["https://me:pass@example.org/a.tar"], ["https://***@example.org/a.tar"]),
        (
            ["https://example.org/a.tar?x=1&token=abc&y=2"],
            ["https://example.org/a.tar?x=1&token=***&y=2"],
        ),
        (
            [f"hf_{'a1' * 17}", f"x=ghp_{'B2' * 18}", f"sk-proj-{'c3' * 20}"],
            ["***", "x=***", "***"],
        ),
        (["a@b/key=1", "models/task-17_with-a-long-name", "hf_short", "tokens=3", "10:30"], None),
    ],
)
def test_provenance_tells_no_secrets(words, shown):
    assert provenance(["certify", *words])["command"] == ["certify", *(shown or words)]


def test_provenance_tells_no_host(monkeypatch):
    """Job files do, where it says who works on a job."""
    real = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((real[0], "secret-host", *real[2:])))
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.setattr(platform, "_platform_cache", {})
    assert platform.node() == "secret-host" and "secret-host" not in str(provenance())


def git(folder, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=Somebody", "-c", "user.email=a@b.org"]
    command += ["-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_recorded_by(package_folder) -> str | None:
    """The commit that the package in this folder records, run from elsewhere."""
    program = (
        "import json; from smoothadv.base.provenance import provenance; "
        "print(json.dumps(provenance()['git_commit']))"
    )
    python = {"PYTHONPATH": str(package_folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_process([sys.executable, "-c", program], package_folder.parent, **python)
    return json.loads(done.stdout)


def test_manifest_records_the_commit_of_the_package_and_whether_files_differ_from_it(
    tmp_path, repository
):
    """But not that of a repository that the package merely lies in."""
    copy, ignored = tmp_path / "clone", shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "code" / "smoothadv", copy / "smoothadv", ignore=ignored)
    git(tmp_path, "init", "--quiet", str(copy))
    git(copy, "commit", "--quiet", "--allow-empty", "-m", "empty")
    assert commit_recorded_by(copy) is None
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "-m", "the package")
    commit, index = git(copy, "rev-parse", "HEAD"), copy / ".git/index"
    before = index.read_bytes()
    os.utime(copy / "smoothadv" / "core.py", (1, 1))  # git would note that it looked at this file
    assert commit_recorded_by(copy) == commit and index.read_bytes() == before, (
        "nor is the index locked"
    )
    with (copy / "smoothadv" / "core.py").open("a") as file:
        file.write("# changed\n")
    assert commit_recorded_by(copy) == commit + "-dirty"
