"""push: a checkpoint goes to the Hugging Face hub, where hf-hub:OWNER/NAME names it, with a model
card made of what it and its logs record.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from smoothadv.analysis.facts import FIELDS, display, recipe_facts
from smoothadv.analysis.report import template
from smoothadv.analysis.table_formats import FORMATS, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.files import write_atomically
from smoothadv.base.settings import Checked, SettingError, output_folder, setting
from smoothadv.cards.board import BoardSpec
from smoothadv.cli.runner import Options, Parser, given_settings, run
from smoothadv.models.name import HUB, members_of
from smoothadv.records.logs import flat

_EXAMPLES = """examples:
  python code/push.py models/pgd_0.25/checkpoint.pth.tar me/pgd-0.25 --to files
  python code/push.py models/pgd_0.25/checkpoint.pth.tar me/pgd-0.25 --card cards/pgd_0.25.json
  python code/certify.py cifar10 hf-hub:me/pgd-0.25 0.25 logs/pgd_0.25.tsv --skip 20
With --to nothing is uploaded. It needs pip install 'smoothadv[hub]', and a token: hf auth login.
"""


def _repository(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text, re.ASCII):
        raise SettingError(f"'{text}' is no OWNER/NAME of a repository on the hub")
    return text


@dataclass(frozen=True, kw_only=True)
class PushSpec(Checked):
    """Put ``checkpoint`` on the hub as ``repository``, or only make the files, in the folder
    ``to``.
    """

    checkpoint: Path = setting(
        parse=Path, flag="checkpoint", help="checkpoint.pth.tar of a classifier or a denoiser"
    )
    repository: str = setting(
        parse=_repository,
        flag="repository",
        metavar="OWNER/NAME",
        help="model repository on the hub; made if it is not there, else it gets a new commit",
    )
    card: tuple[str, ...] = setting(
        (),
        parse=str,
        metavar="CARD",
        help="cards that analyze card made of logs of this checkpoint: their certified accuracies "
        "become part of the model card",
    )
    license: str | None = setting(
        None, parse=str, metavar="ID", help="the model card's license, like mit (default: none)"
    )
    private: bool = setting(False, help="make a new repository that others cannot see")
    to: Path | None = setting(
        None,
        parse=output_folder,
        metavar="FOLDER",
        help="write the files to FOLDER, to look at them, and upload nothing; config.json names "
        "the dataset as the training did, with its folder",
    )


def push(spec: PushSpec) -> list[str]:
    """Upload the files of a spec, or write them; returns what was done, for people.

    UserError, and nothing is uploaded, where a hub cannot give the checkpoint back as it is, or a
    card is of another model.
    """
    files = files_of(spec)
    if spec.to is not None:
        paths = {spec.to / name: content for name, content in files.items()}
        if existing := [path for path in paths if path.exists()]:
            raise UserError(f"{existing[0]} exists already: name another folder with --to")
        for path, content in paths.items():
            write_atomically(path, methodcaller("write", content))
        return [f"wrote {path}" for path in paths]
    from smoothadv.models.contents import hub_asked_once, hub_errors  # imports torch

    with hub_errors(spec.repository), hub_asked_once():
        from huggingface_hub import CommitOperationAdd, HfApi, get_token

        if get_token() is None:
            raise UserError(
                f"{spec.repository}: this needs a token that may write: hf auth login, or HF_TOKEN"
            )
        hub = HfApi()
        # A repository that is there would stay as visible as it is.
        hub.create_repo(spec.repository, private=spec.private or None, exist_ok=not spec.private)
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        done = hub.create_commit(
            spec.repository, operations, commit_message=f"Push {spec.checkpoint.name}"
        )
    return [f"{done.commit_url}: use it as {HUB}{spec.repository}@{done.oid}"]


def files_of(spec: PushSpec) -> dict[str, bytes]:
    """The files of a repository, by name; UserError as ``push``."""
    from smoothadv.models.checkpoint import MODULE_PREFIX, USED, read_checkpoint  # imports torch
    from smoothadv.models.contents import checkpoint_digest, hub_errors, packed

    path = spec.checkpoint
    if members_of(path).mean is not None:
        raise UserError(
            f"{path} is an ensemble: push each member, and name the ensemble {HUB}A+{HUB}B"
        )
    content = read_checkpoint(path, denoiser=None)
    if content["arch"].startswith(MODULE_PREFIX):
        raise UserError(f"{path} holds the weights of a module, which no name can make again")
    sha256, fields = checkpoint_digest(path), {one: content[one] for one in content if one in USED}
    with hub_errors(f"push {path}"):  # of what its formats cannot hold, too
        files = packed(content["state_dict"], fields, sha256)
    board = ""
    if spec.card:
        cards = BoardSpec(cards=spec.card)
        for card in (one for ranked in cards.rankings().values() for one in ranked):
            if card["facts.denoiser"]:
                raise UserError(f"{card.path} is the card of a model behind a denoiser")
            if (found := card["model_sha256"]) != sha256:
                raise UserError(
                    f"{card.path} is the card of another model: its model_sha256 is {found}, that "
                    f"of {path} is {sha256}"
                )
        board = cards.text("markdown")
    return {
        **files,
        "README.md": _model_card(spec, fields, board).encode(errors="backslashreplace"),
    }


def _model_card(spec: PushSpec, fields: dict[str, Any], board: str) -> str:
    # With a colon it may be a folder or a file of the user's, whose place says nothing to others.
    kind, _, place = str(fields.get("dataset") or "").partition(":")
    recipe, denoises, name = (
        fields.get("recipe") or {},
        fields.get("denoiser"),
        HUB + spec.repository,
    )
    facts = recipe_facts(flat(recipe))
    facts |= {"dataset": kind, "arch": fields["arch"], "noise": fields.get("noise_sd")}
    rows = [
        [FIELDS[one], display(one, facts[one])]
        for one in FIELDS
        if facts.get(one) not in (None, "")
    ]
    options = {
        "denoiser": name if denoises else recipe.get("behind") and "DENOISER",
        "resize": recipe.get("resize"),
    }
    return template("smoothadv.cards", "model_card.md.jinja").render(
        json=json.dumps,
        repository=spec.repository,
        name=name,
        license=spec.license,
        dataset=None if place else kind,
        noise=facts["noise"],
        denoises=denoises,
        options=[(option, value) for option, value in options.items() if value],
        settings=FORMATS["markdown"](
            Table(columns_of("text", name="setting", value="value"), rows)
        ),
        board=board,
    )


make_parser = partial(
    Parser,
    prog="push",
    kinds=[PushSpec],
    epilog=_EXAMPLES,
    description="Put a checkpoint on the Hugging Face hub: weights as safetensors, what is needed "
    "to use them, and a model card. Certify it there as hf-hub:OWNER/NAME@REVISION.",
)


def _push(parser: Parser, options: Options, command: Sequence[str]) -> None:
    for line in push(PushSpec(**given_settings(PushSpec, options))):
        print(line)


main = partial(run, "push", make_parser, _push)
