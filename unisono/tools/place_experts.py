"""``unisono place-experts``: an order of experts for ``--expert-placement``, from the tokens that a server counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def place_experts(
    info: Annotated[Path, typer.Argument(metavar="INFO", help="A file with the JSON of a server's /server_info.")],
    ranks: Annotated[int, typer.Option(min=2, help="--tensor-parallel-size of the server that reads the order.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
) -> None:
    """Place experts on ranks so that each has equally many tokens; the text stays the same.

    Prints for each layer the tokens of the busiest rank over the mean, before and after.
    """
    from unisono.config.expert_placement import busiest_share, placement_of, tokens_in
    from unisono.config.untrusted_files import read_json

    found = read_json(info)
    placement = placement_of(found, ranks)
    for path, tokens in tokens_in(found).items():
        before = busiest_share(tokens, range(len(tokens)), ranks)
        print(f"{path}: {before:.2f} -> {busiest_share(tokens, placement[path], ranks):.2f}")
    out.write_text(json.dumps(placement))
