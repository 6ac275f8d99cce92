"""A Hugging Face hub on this machine, with the few calls that pushing and downloading models
take.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from smoothadv.models import hub as checkpoints_on_hub

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


@contextmanager
def served() -> Iterator[Hub]:
    """A hub that answers within this context."""
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield handler.hub
        finally:
            server.shutdown()
            thread.join()


def stand_in(hub: Hub, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process download what a hub has without HTTP, to a folder."""
    import huggingface_hub

    def download(repository: str, name: str, revision: str | None = None) -> str:
        commit = hub.commit(repository, revision or "main")
        path = folder / repository / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hub.files(repository, commit)[name])
        return str(path)

    patch.setattr(huggingface_hub, "hf_hub_download", download)
    patch.setattr(checkpoints_on_hub, "hub_asked_once", nullcontext)
    checkpoints_on_hub._pulled.cache_clear()
