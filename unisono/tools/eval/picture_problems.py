"""The held-out problems with images of ``unisono eval`` for vision models: scenes, questions, answers.

They are stored in ``picture_problems.jsonl`` as descriptions, which ``scenes.draw`` renders. In a checkout ``python -m
training.tiny_vl.problems`` writes that file.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.tools.eval.scenes import Scene, draw
from unisono.types import ConfigError

FILE = Path(__file__).parent / "picture_problems.jsonl"
COUNT = 300
"""Number of stored problems."""


@dataclass(frozen=True)
class PictureProblem:
    """A problem with an image. kind: of the question, for tables. final_answer: the word after ``####``."""

    kind: str
    scene: Scene
    question: str
    final_answer: str

    def png(self) -> bytes:
        """The image as a PNG file."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(draw(self.scene)).save(file, "PNG")
        return file.getvalue()

    def messages(self) -> list[dict[str, Any]]:
        """The question as a conversation for a chat request, with its image as a data URL."""
        url = "data:image/png;base64," + base64.b64encode(self.png()).decode()
        picture = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.question}]}]


def picture_problems(count: int) -> list[PictureProblem]:
    """The first ``count`` problems, always in the same order. Raises ConfigError above ``COUNT``."""
    if count > COUNT:
        raise ConfigError(f"{count} held-out picture problems were requested, but only {COUNT} exist: request fewer.")
    found = []
    with FILE.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            data = json.loads(line)
            found.append(PictureProblem(**data | {"scene": Scene.of(data["scene"])}))
    return found
