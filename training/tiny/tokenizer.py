"""The bundled model's tokenizer: byte-level BPE with single digits, and the ChatML template.

``train_tokenizer`` trains it on the training text. ``save_tokenizer`` writes the files that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.tiny.batches import Source
from training.tiny.documents import END, SPECIAL_TOKENS, START, STOP, document, standard_library

VOCABULARY = 4096
SAMPLE_DOCUMENTS = 12_000
MAX_LENGTH = 4096

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '" + START + "' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}"
    "{%- for part in message['content'] if part['type'] == 'text' %}{{- part['text'] }}{%- endfor %}{%- endif %}"
    "{{- '" + STOP + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + START + "assistant\\n' }}{%- endif %}"
)


def train_tokenizer(
    seed: int, documents: int = SAMPLE_DOCUMENTS, source: Source = document, marks: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer of ``VOCABULARY`` tokens, the special ones first (ids 0, 1, 2), trained on a sample of the text.

    marks: texts that are tokens of their own and are not skipped in decoding; they get the last ids.
    """
    rng, library = Random(f"tokenizer {seed}"), standard_library()
    sample = ["".join(piece for piece, _ in source(rng, library)) for _ in range(documents)] + library
    for mark in marks:
        sample = [text.replace(mark, "") for text in sample]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                "\n", "isolated"
            ),  # a newline is a token of its own, so that a prompt may end with one
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": STOP,
        "pad_token": END,
        "additional_special_tokens": [START, STOP],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat_template)
