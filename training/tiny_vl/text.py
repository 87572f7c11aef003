"""The text of ``tiny-vl``: its tokenizer, its chat template, and prompts as token ids.

A tokenizer in the form of the other bundled models', of at most 576 tokens; Qwen3-VL's marks around pictures come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.tiny.documents import END, SPECIAL_TOKENS, START, STOP
from training.tiny.tokenizer import save_tokenizer
from training.tiny_vl.questions import ask
from training.tiny_vl.scenes import SIZES, random_scene

VOCABULARY = 576
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
MARKS = (VISION_START, VISION_END, IMAGE, VIDEO)
SAMPLE_SCENES = 20_000
PLAIN = (
    "system\nuser\nassistant\nYou are a helpful assistant. Answer briefly. Look at the picture. Hello! Thank you. "
    "Please tell me what is shown here, and explain it. I see shapes, digits and bar charts in small pictures.\n"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '" + START + "' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part or 'image_url' in part %}"
    "{{- '" + VISION_START + IMAGE + VISION_END + "' }}"
    "{%- elif part['type'] == 'video' or part['type'] == 'video_url' or 'video' in part %}"
    "{{- '" + VISION_START + VIDEO + VISION_END + "' }}"
    "{%- elif 'text' in part %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '" + STOP + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + START + "assistant\\n' }}{%- endif %}"
)


def train_tokenizer(seed: int, scenes: int = SAMPLE_SCENES) -> Tokenizer:
    """A tokenizer trained on questions and answers about ``scenes`` random scenes."""
    rng, sample = Random(f"tokenizer {seed}"), [PLAIN] * 50
    for _ in range(scenes):
        asked = ask(rng, random_scene(rng, rng.choice(SIZES), 1.0, held_out=False))
        sample += [asked.question, asked.answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


class Format:
    """Conversations as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        known = tokenizer.get_vocab()
        self.image, self.video, self.start, self.end = (known[one] for one in (IMAGE, VIDEO, VISION_START, VISION_END))
        self.stop, self.pad = known[STOP], known[END]
        self.asked, self.answered = self.ids(f"{START}user\n"), self.ids(f"{STOP}\n{START}assistant\n")
        self.newline = self.ids("\n")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def picture(self, tokens: int) -> list[int]:
        """A picture's placeholders and the marks around them."""
        return [self.start, *[self.image] * tokens, self.end]

    def prompt(self, question: str, tokens: int, first: bool = True) -> list[int]:
        """A question about one picture up to where its answer begins. first: the picture stands before the text."""
        parts: Sequence[list[int]] = (self.picture(tokens), self.ids(question))
        ordered = parts if first else parts[::-1]
        return [*self.asked, *ordered[0], *ordered[1], *self.answered]


def save_text(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files and the chat template."""
    save_tokenizer(tokenizer, folder, CHAT_TEMPLATE)
