"""The training text of ``tiny-hybrid``: that of ``training.tiny``, with the steps of a solution as thinking.

As in Qwen3.5, the prompt of an answer ends with the opening mark, and a client turns thinking off with the template
variable ``enable_thinking``: the prompt then holds an empty thought, and the steps stand in the answer. The template
drops the thoughts of earlier turns. This module does not import torch.
"""

from __future__ import annotations

from random import Random

from training.tiny.documents import ASKED, END, START, STOP, SYSTEMS, Document, exchange
from training.tiny.documents import document as plain_document

THINK, THOUGHT = "<think>", "</think>"
MARKS = (THINK, THOUGHT)

WITHOUT_THINKING = 0.12
"""Share of answers whose prompt turns thinking off."""

EARLIER = 0.2
"""Loss weight of the answers of earlier turns: their prompts, without a thinking mark, occur in no request."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['content'] is string %}{%- set text = message['content'] %}"
    "{%- else %}{%- set text = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text')"
    " | join %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and '" + THOUGHT + "' in text %}"
    "{%- set text = text.split('" + THOUGHT + "')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '" + START + "' + message['role'] + '\\n' + text + '" + STOP + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + START + "assistant\\n" + THINK + "\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n" + THOUGHT + "\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def document(rng: Random, library: list[str]) -> Document:
    """A random document; those in chat form have thinking."""
    return plain_document(rng, library, conversation)


def conversation(rng: Random) -> Document:
    """A conversation as the chat template writes it; only its last turn shows a thought."""
    turns = 1 if rng.random() < 0.88 else rng.randint(2, 4)
    pieces: Document = []
    if rng.random() < 0.2:
        pieces.append((f"{START}system\n{rng.choice(SYSTEMS)}{STOP}\n", 0.0))
    for turn in range(turns):
        question, whole, problem = exchange(rng)
        steps, answer = ("", _about_itself(whole)) if problem is None else thought_and_answer(whole)
        pieces.append((f"{START}user\n{question}{STOP}\n", ASKED))
        pieces.append((f"{START}assistant\n", 0.0))
        if turn < turns - 1:
            pieces.append((f"{answer}{STOP}\n", EARLIER))
        elif rng.random() < WITHOUT_THINKING:
            pieces += [(f"{THINK}\n\n{THOUGHT}\n\n", 0.0), (f"{_about_itself(whole)}{STOP}\n", 1.0)]
        else:
            pieces += [(f"{THINK}\n", 0.0), (f"{steps}\n{THOUGHT}\n\n{answer}{STOP}\n", 1.0)]
    return [*pieces, (END, 1.0)]


def thought_and_answer(worked_answer: str) -> tuple[str, str]:
    """Splits a worked answer into its steps and what is answered after them."""
    steps, _, final = worked_answer.rpartition("\n#### ")
    return steps, f"The answer is {final}.\n#### {final}"


def _about_itself(answer: str) -> str:
    return answer.replace("about seven million parameters", "about eight million parameters, most of them in experts")
