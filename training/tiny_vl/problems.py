"""Writes the held-out picture problems of ``unisono eval``: ``python -m training.tiny_vl.problems``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from training.tiny_vl.questions import ask
from training.tiny_vl.scenes import SIZE_WEIGHTS, SIZES, random_scene
from unisono.tools.eval.picture_problems import COUNT, FILE, PictureProblem


def held_out_problems(count: int, seed: int = 0) -> list[PictureProblem]:
    """Problems about scenes whose compositions training never sees. The same count and seed give the same."""
    rng, found = Random(f"held out {seed}"), []
    for _ in range(count):
        scene = random_scene(rng, rng.choices(SIZES, SIZE_WEIGHTS)[0], 1.0, held_out=True)
        asked = ask(rng, scene)
        found.append(PictureProblem(asked.kind, scene, asked.question, asked.final_answer))
    return found


def lines() -> list[str]:
    """The file's lines."""
    stored = []
    for one in held_out_problems(COUNT):
        scene = {name: value for name, value in one.scene.as_json().items() if value}
        data = {"kind": one.kind, "question": one.question, "final_answer": one.final_answer, "scene": scene}
        stored.append(json.dumps(data, separators=(",", ":")))
    return stored


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="file to write")
    parser.parse_args().out.write_text("\n".join(lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
