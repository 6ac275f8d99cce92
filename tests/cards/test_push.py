"""push, and what it pushed in place of a file: with a Hugging Face hub on this machine, which
answers the few calls that this takes, and without HTTP.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import smoothadv
from smoothadv.base.files import digest, file_digest
from smoothadv.checkpoints import load_classifier
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models import contents as checkpoints_on_hub
from support.commands import Outcome, call, manifest_of, refused, succeed, timeless

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
client = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
FEW = ("--N", 200, "--skip", 40, "--device", "cpu")
NAME = "hf-hub:me/pgd"
WRITER, READER = "hf_writer", "hf_reader"


@dataclass
class Hub:
    """What was pushed: the files of each commit, newest last, by repository; ``private`` are those
    repositories that others cannot see, ``asked`` the requests.
    """

    address: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files at a revision; KeyError unless both are there."""
        return self.commits[repository][self.commit(repository, revision)]

    def commit(self, repository: str, revision: str = "main") -> str:
        return [*self.commits[repository]][-1] if revision == "main" else revision

    def put(self, repository: str, files: dict[str, bytes]) -> str:
        """A new commit of all these files; returns its digest."""
        known = self.commits.setdefault(repository, {})
        name = hashlib.sha1(repr([len(known), files]).encode()).hexdigest()
        known[name] = files
        return name


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def answer(self, content: Any = b"", status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        if not (asked := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)):
            return self.answer({"id": "any"})
        repository, revision, name = asked.groups()
        missing, is_private = "RepoNotFound", repository in self.hub.private
        if repository in self.hub.commits and not (is_private and self.refusal()):
            missing = "RevisionNotFound"
            commit = self.hub.commit(repository, revision)
            if commit in self.hub.commits[repository]:
                missing, files = "EntryNotFound", self.hub.files(repository, commit)
                if name in files:
                    etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
                    return self.answer(files[name], ETag=etag, X_Repo_Commit=commit)
        return self.answer(status=404, X_Error_Code=missing)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer()

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def refusal(self) -> int:
        """The status that says why the token may not write or see private things; 0: it may."""
        return {f"Bearer {WRITER}": 0, f"Bearer {READER}": 403}.get(
            self.headers["Authorization"], 401
        )

    def do_POST(self) -> None:
        body = self.body()
        self.hub.asked.append(f"POST {self.path}")
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if status := self.refusal():
            wrong = "Invalid credentials in Authorization header" * (status == 401)
            return self.answer({"error": "no"}, status, X_Error_Message=wrong)
        lines = [json.loads(line) for line in body.splitlines()]
        if self.path == "/api/repos/create":
            return self.create(lines[0])
        if self.path.endswith("/objects/batch"):
            return self.answer({"objects": [self.place(one) for one in lines[0]["objects"]]})
        if "/preupload/" in self.path:
            return self.answer({"files": [self.mode(one["path"]) for one in lines[0]["files"]]})
        repository = re.fullmatch(r"/api/models/(.+)/commit/main", self.path)[1]
        files = dict[str, bytes]()
        for value in (line["value"] for line in lines[1:]):
            large = self.hub.objects.get(value.get("oid"))
            files[value["path"]] = base64.b64decode(value["content"]) if large is None else large
        commit = self.hub.put(repository, files)
        address = f"{self.hub.address}/{repository}/commit/{commit}"
        return self.answer({"commitUrl": address, "commitOid": commit})

    def create(self, asked: dict[str, Any]) -> None:
        repository = f"{asked['organization']}/{asked['name']}"
        is_there = repository in self.hub.commits
        self.hub.commits.setdefault(repository, {})
        if asked.get("visibility", asked.get("private")) in ("private", True):
            self.hub.private.add(repository)
        self.answer({"url": f"{self.hub.address}/{repository}"}, 409 if is_there else 200)

    def mode(self, name: str) -> dict[str, Any]:
        mode = "lfs" if name.endswith(".safetensors") else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False}

    def place(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self.hub.address}/objects/{one['oid']}"}}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield handler.hub
        server.shutdown()
        thread.join()


# Runs commands one after the other, each with its token, and prints what each left behind.
PROGRAM = """
import contextlib, io, json, os, sys
from smoothadv.cli import main

for token, words in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture
def run_all(warm, hub, workplace):
    """Run commands, (token, words) of each, in a process that knows no other hub."""

    def run_all(*commands: tuple[str, list[object]], **environment: str) -> list[Outcome]:
        known = {"HF_ENDPOINT": hub.address, "HF_HOME": str(workplace / "home")}
        known |= {"HF_HUB_DISABLE_XET": "1", **environment}
        given = json.dumps([(token, [*map(str, words)]) for token, words in commands])
        process = warm.start([sys.executable, "-c", PROGRAM, given], workplace, **known)
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        return [Outcome(*json.loads(line)) for line in out.splitlines()]

    return run_all


@pytest.fixture
def run(run_all):
    """Run a command as its own process, with a token that may write."""
    return lambda *words, **environment: run_all((WRITER, words), **environment)[0]


def pushed(checkpoint: Path, folder: Path, *words: object) -> dict[str, bytes]:
    succeed("push", checkpoint, "me/pgd", "--to", folder, *words)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def stored(checkpoints, tmp_path, monkeypatch) -> Hub:
    """A hub without HTTP that has a checkpoint as me/pgd, and another as me/ddn."""
    hub = Hub()
    for name in ("pgd", "ddn"):
        hub.put(f"me/{name}", pushed(checkpoints[name.upper()], tmp_path / name))

    def download(repository: str, name: str, revision: str | None = None) -> str:
        commit = hub.commit(repository, revision or "main")
        path = tmp_path / "cache" / repository / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hub.files(repository, commit)[name])
        return str(path)

    monkeypatch.setattr(client, "hf_hub_download", download)
    monkeypatch.setattr(checkpoints_on_hub, "hub_asked_once", nullcontext)
    checkpoints_on_hub._pulled.cache_clear()
    return hub


def test_certificates_are_those_of_the_file_after_a_round_trip(checkpoints, hub, run, run_all):
    """The log also says from which commit, and the file goes on where that of the hub ended."""
    model = checkpoints["PGD"]
    certify = ("certify", "digits")
    succeed(*certify, model, 0.25, "file.tsv", *FEW)
    succeed("analyze", "card", "file.tsv", "-o", "card.json")
    push = ["push", model, "me/pgd", "--card", "card.json", "--license", "mit"]
    three = [*certify, NAME, 0.25, "both.tsv", *FEW, "--max", 3]
    done, begun = run_all((WRITER, push), (WRITER, three))
    commit = hub.commit("me/pgd")
    assert (done.code, done.err) == (0, "") and f"use it as {NAME}@{commit}\n" in done.out
    assert begun.code == 0
    assert len(timeless(Path("both.tsv"))) == 3
    succeed(*certify, model, 0.25, "both.tsv", *FEW)
    assert timeless(Path("file.tsv")) == timeless(Path("both.tsv"))
    ours, theirs = (manifest_of(Path(log)) for log in ("file.tsv", "both.tsv"))
    assert ours["settings"] == theirs["settings"] and len(timeless(Path("both.tsv"))) == 9
    assert theirs["runs"][0]["checkpoint"] == f"{NAME}@{commit}"

    files = hub.files("me/pgd")
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    source = torch.load(model, weights_only=True)
    fields = json.loads(files["config.json"])["checkpoint"]
    assert {name: source[name] for name in fields} == fields and "recipe" in fields
    assert not fields.keys() & {"optimizer", "history", "runs", "state_dict"}

    text = files["README.md"].decode()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["library_name"] == "smoothadv" and header["license"] == "mit"
    assert header["pipeline_tag"] == "image-classification" and header["datasets"] == ["digits"]
    values = json.loads(Path("card.json").read_text())["values"]["certified_accuracy"]["0.25"]
    share, low, high = (f"{100 * value:.1f}" for value in values)
    assert f"{share} ({low}–{high})" in text and "all rows recomputed" in text
    assert f"smoothadv certify digits {NAME} 0.25" in text and "SmoothAdv-PGD" in text

    # A newer commit is another model; verify takes the one that the log names.
    newer, verified, other, pinned = run_all(
        (WRITER, ["push", checkpoints["DDN"], "me/pgd"]),
        (WRITER, ["certify", "verify", "both.tsv", "--rows", 4]),
        (WRITER, [*certify, NAME, 0.25, "both.tsv", *FEW]),
        (WRITER, [*certify, f"{NAME}@{commit}", 0.25, "pinned.tsv", *FEW]),
    )
    assert newer.code == 0 and "all are equal" in verified.out
    assert refused(other, "both.tsv", "another model", "checkpoint_sha256")
    assert pinned.code == 0 and timeless(Path("pinned.tsv")) == timeless(Path("file.tsv"))


def test_what_the_hub_refuses_is_one_line(checkpoints, hub, run_all):
    push = ["push", checkpoints["PGD"], "me/pgd"]
    assert refused(*run_all(("", push)), "me/pgd", "hf auth login")
    assert hub.asked == ["HEAD /"], "nothing is sent without a token"
    private = (WRITER, [*push, "--private"])
    reader, old, done, again = run_all((READER, push), ("hf_old", push), private, private)
    assert refused(reader, "me/pgd", "permission to write")
    assert refused(old, "does not accept the token")
    assert done.code == 0 and hub.private == {"me/pgd"}
    assert refused(again, "exists already", "--private")
    hub.put("you/vit", {"config.json": b'{"architectures": ["ViT"]}'})
    hub.put("you/data", {"README.md": b""})
    asked = [
        (NAME, "", "is private and needs a token"),
        ("hf-hub:me/other", WRITER, "no such repository"),
        (f"{NAME}@v2", WRITER, "no such revision"),
        ("hf-hub:you/vit", WRITER, "hf:OWNER/NAME"),
        ("hf-hub:you/data", WRITER, "not made by smoothadv push"),
    ]
    certify = [
        (token, ["certify", "digits", name, 0.25, "log.tsv", *FEW]) for name, token, _ in asked
    ]
    for (name, _, words), outcome in zip(asked, run_all(*certify)):
        assert refused(outcome, name, words) and not Path("log.tsv").exists()


def test_without_the_server_the_cache_is_used(checkpoints, hub, run, run_all, tmp_path):
    hub.put("me/pgd", pushed(checkpoints["PGD"], tmp_path / "files"))
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # where nobody answers
    certify = ("certify", "digits", NAME, 0.25)
    push = ["push", checkpoints["PGD"], "me/pgd"]
    made, pushed_away = run_all((WRITER, [*certify, "log.tsv", *FEW]), (WRITER, push), **away)
    assert refused(made, NAME, "cannot be reached", "cache")
    assert refused(pushed_away, "cannot be reached")
    assert run(*certify, "first.tsv", *FEW).code == 0
    for log, environment in [("away.tsv", away), ("offline.tsv", {"HF_HUB_OFFLINE": "1"})]:
        assert run(*certify, log, *FEW, **environment).code == 0
        assert timeless(Path(log)) == timeless(Path("first.tsv"))


def test_functions_and_commands_take_names_of_the_hub_like_files(
    checkpoints, stored, workplace, capsys
):
    files, names = (checkpoints["PGD"], checkpoints["DDN"]), (NAME, "hf-hub:me/ddn")
    images = torch.rand(4, 1, 8, 8)
    for one, other in [(files[0], NAME), ("+".join(map(str, files)), "+".join(names))]:
        logits = [load_classifier(name, "digits")(images) for name in (one, other)]
        assert torch.equal(*logits)
    cheap = {"sigma": 0.25, "n": 100, "limit": 2}
    smoothadv.certify("+".join(names), "digits", **cheap, log="plus.tsv")
    recorded = manifest_of(Path("plus.tsv"))
    digests = {"logits": [file_digest(path) for path in files]}
    assert recorded["settings"]["checkpoint_sha256"] == digests
    assert len(smoothadv.certify(NAME, images, [0] * 4, sigma=0.25, n=100)) == 4
    commits = [f"{name}@{stored.commit(name.partition(':')[2])}" for name in names]
    assert recorded["runs"][0]["checkpoint"] == "+".join(commits)
    run = ["--noise", 0.25, "--steps-per-epoch", 1, "--epochs", 1, "--device", "cpu"]
    run += ["--evaluate-images", 1, "--batch", 16]
    start = ["digits", "digits_resnet8", "run", *run, "--pretrained-model", NAME]
    teacher = ["--objective", "distillation", "--teacher", NAME]
    assert f"starting from {NAME} with all" in call(capsys, "train", *start, *teacher).out
    recipe = json.loads(Path("run/args.json").read_text())["recipe"]
    sha256 = file_digest(files[0])
    assert recipe["pretrained_sha256"] == recipe["teacher_sha256"] == sha256


def test_integers_and_denoisers_are_pushed_too(checkpoint, integers, stored, workplace):
    stored.put("me/integers", pushed(integers, Path("integers")))
    network = load_classifier("hf-hub:me/integers", "digits")
    images = network.probe_images()
    assert isinstance(network, IntegerNetwork)
    assert torch.equal(network(images), load_classifier(integers, "digits")(images))
    short = ["--noise", 0.25, "--steps-per-epoch", 1, "--epochs", 1, "--device", "cpu"]
    short += ["--evaluate-images", 1]
    succeed("train_denoiser", "digits", "digits_dncnn", "run", *short)
    stored.put("me/denoiser", pushed(Path("run/checkpoint.pth.tar"), Path("denoiser")))
    assert 'pipeline_tag: "image-to-image"' in Path("denoiser/README.md").read_text()
    for name in ("run/checkpoint.pth.tar", "hf-hub:me/denoiser"):
        log = f"{name[-8:]}.tsv"
        succeed("certify", "digits", checkpoint, 0.25, log, *FEW, "--max", 2, "--denoiser", name)
    file, hub = (manifest_of(Path(log)) for log in (".pth.tar.tsv", "denoiser.tsv"))
    assert file["settings"] == hub["settings"]
    assert hub["runs"][0]["denoiser"] == f"hf-hub:me/denoiser@{stored.commit('me/denoiser')}"


def test_page_does_not_name_a_folder_of_the_user(checkpoint, workplace):
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "dataset": "imagefolder:/home/somebody"}, "own.pth.tar")
    text = pushed(Path("own.pth.tar"), Path("own"))["README.md"].decode()
    assert "somebody" not in text and "| imagefolder" in text.replace("  ", " ")
    assert "smoothadv certify DATASET hf-hub:me/pgd" in text and "datasets:" not in text


def of_config(**changes: object):
    """Changes entries of config.json; None removes one."""

    def change(files: dict[str, bytes]) -> None:
        config = {**json.loads(files["config.json"]), **changes}
        kept = {name: value for name, value in config.items() if value is not None}
        files["config.json"] = json.dumps(kept).encode()

    return change


def no_weights(files: dict[str, bytes]) -> None:
    files["model.safetensors"] = b"\x80\x04."  # a pickle
    of_config(weights_sha256=digest([b"\x80\x04."]))(files)


def one_bit(files: dict[str, bytes]) -> None:
    whole = bytearray(files["model.safetensors"])
    whole[-1] ^= 1
    files["model.safetensors"] = bytes(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (one_bit, ["model.safetensors is damaged", "downloaded again"]),
        (no_weights, ["me/pgd, model.safetensors: ", "header"]),
        (lambda files: files.update({"config.json": b"{"}), ["not made by smoothadv push"]),
        (lambda files: files.update({"config.json": b"[1]"}), ["not made by smoothadv push"]),
        (of_config(smoothadv=None), ["not made by smoothadv push", "timm:hf-hub:"]),
        (of_config(smoothadv=2), ["is of version 2, expected 1"]),
        (of_config(checkpoint_sha256=None), ["no checkpoint_sha256"]),
        (of_config(weights_sha256=7), ["weights_sha256"]),
        (of_config(checkpoint=None), ["no checkpoint"]),
        (of_config(checkpoint={"epoch": 3}), ["not the name of their architecture"]),
        (of_config(checkpoint={"epoch": 3, "arch": "resnet9"}), ["resnet9"]),
        (of_config(checkpoint={"epoch": 3, "arch": 9}), ["its arch is 9, expected text"]),
    ],
)
def test_repository_with_a_fault_is_one_line(change, words, stored, workplace, capsys):
    files = dict(stored.files("me/pgd"))
    change(files)
    stored.put("me/pgd", files)
    outcome = call(capsys, "certify", "digits", NAME, 0.25, "log.tsv", *FEW)
    assert refused(outcome, NAME, *words) and not Path("log.tsv").exists()


@pytest.mark.parametrize("name", ["hf-hub:", "hf-hub:me", "hf-hub:me/a/b", "hf-hub:me/a@"])
def test_malformed_name_is_refused(name, capsys, workplace):
    outcome = call(capsys, "certify", "digits", name, 0.25, "log.tsv")
    assert refused(outcome, name, "expected hf-hub:OWNER/NAME")


def test_push_refuses_what_a_hub_cannot_give_back(checkpoints, workplace, capsys):
    """Without a word to any hub."""
    model = checkpoints["PGD"]
    Path("kept").mkdir()
    Path("kept/README.md").write_text("mine")
    torch.save({"epoch": 1, "arch": "module:Net", "state_dict": {}}, "module.pth.tar")
    sparse = {"epoch": 1, "arch": "lenet", "state_dict": {"w": torch.eye(2).to_sparse()}}
    torch.save(sparse, "sparse.pth.tar")
    certify = ["certify", "digits", "PGD.pth.tar", 0.25]
    Path("PGD.pth.tar").write_bytes(model.read_bytes())
    short = ["--noise", 0.25, "--steps-per-epoch", 1, "--epochs", 1, "--device", "cpu"]
    short += ["--evaluate-images", 1]
    succeed("train_denoiser", "digits", "digits_dncnn", "d", *short)
    for log, further in [("plain", []), ("behind", ["--denoiser", "d/checkpoint.pth.tar"])]:
        succeed(*certify, f"{log}.tsv", *FEW, "--max", 2, *further)
        succeed("analyze", "card", f"{log}.tsv", "-o", f"{log}.json")
    card = json.loads(Path("plain.json").read_text())
    for words, expected in [
        ((f"{model}+{checkpoints['DDN']}",), ["ensemble", "push each member"]),
        (("module.pth.tar",), ["module.pth.tar", "weights of a module"]),
        (("sparse.pth.tar",), ["push sparse.pth.tar: ", "sparse tensor"]),
        (("none.pth.tar",), ["none.pth.tar does not exist"]),
        ((checkpoints["DDN"], "--card", "plain.json"), ["plain.json", "of another model"]),
        ((model, "--card", "behind.json"), ["behind.json", "behind a denoiser"]),
        ((model, "--card", "plain.tsv"), ["plain.tsv"]),
        ((model, "--to", "kept"), ["kept/README.md exists already"]),
    ]:
        first, *further = words
        further = further if "--to" in further else [*further, "--to", "files"]
        outcome = call(capsys, "push", first, "me/pgd", *further)
        assert refused(outcome, *expected) and not Path("files").exists(), outcome
    assert card["model_sha256"] == file_digest(model) and Path("kept/README.md").read_text()
    outcome = call(capsys, "push", model, "me", "--to", "files")
    assert refused(outcome, "'me' is no OWNER/NAME", code=2)


@pytest.mark.parametrize("package", ["huggingface_hub", "safetensors"])
def test_missing_package_is_one_line_with_the_extra(
    package, checkpoint, stored, workplace, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [one for one in sys.modules if one.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    words = package, "pip install 'smoothadv[hub]'"
    assert refused(call(capsys, "push", checkpoint, "me/pgd"), *words)
    assert refused(call(capsys, "certify", "digits", NAME, 0.25, "log.tsv", *FEW), NAME, *words)
