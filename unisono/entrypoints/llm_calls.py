"""Checks of arguments of the methods of ``LLM`` and ``AsyncLLM``; messages name the accepted values. Imports types
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unisono.types import BadRequest, SamplingParams

PROMPT = "a string, a list of token ids or a mapping such as {'prompt': …} or {'prompt_token_ids': […]}"


def as_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or many as a list; a list of ints is one prompt of token ids. Raises BadRequest."""
    if isinstance(prompts, (str, Mapping)):
        return [_checked(prompts, "prompts")]
    values = _as_list(prompts)
    if values is None:
        raise BadRequest(f"prompts is {_kind(prompts)}; give {PROMPT}, or a list of these.", "prompts")
    if values and all(_is_id(each) for each in values):
        return [values]
    for number, one in enumerate(values):
        if not isinstance(one, (str, Mapping)) and _token_ids(one) is None:
            raise BadRequest(f"prompts[{number}] is {_kind(one)}; give {PROMPT}.", "prompts")
    return [_checked(one, f"prompts[{number}]") for number, one in enumerate(values)]


def as_prompt(prompt: Any) -> Any:
    """Check a single prompt, for a method that takes no list of them. Raises BadRequest."""
    if isinstance(prompt, (str, Mapping)):
        return _checked(prompt, "prompt")
    ids = _token_ids(prompt)
    if ids is None:
        raise BadRequest(f"prompt is {_kind(prompt)}; give {PROMPT}.", "prompt")
    return ids


def _checked(prompt: Any, where: str) -> Any:
    """Check a prompt's type; return it with token ids as a list. Raises BadRequest."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping):
        return _token_ids(prompt)
    settings = prompt.get("mm_processor_kwargs")
    if settings is not None and not isinstance(settings, Mapping):
        raise BadRequest(f"{where}: mm_processor_kwargs is {_kind(settings)}; give a mapping of settings.", "prompt")
    if "prompt_token_ids" not in prompt:
        return prompt
    ids = _token_ids(prompt["prompt_token_ids"])
    if ids is None:
        kind = _kind(prompt["prompt_token_ids"])
        raise BadRequest(f"{where}: prompt_token_ids is {kind}; give a list of token ids.", "prompt")
    return {**prompt, "prompt_token_ids": ids}


def as_params(params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Return the sampling parameters of each of ``count`` prompts, from one for all, one each or None. Raises
    BadRequest.
    """
    if params is None or isinstance(params, SamplingParams):
        return [default if params is None else params] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        odd = params
        if isinstance(params, (list, tuple)):
            odd = next(one for one in params if not isinstance(one, SamplingParams))
        raise BadRequest(
            f"sampling_params has {_kind(odd)}; give SamplingParams(…), or a list with one for each prompt.",
            "sampling_params",
        )
    if len(params) != count:
        raise BadRequest(f"{len(params)} SamplingParams for {count} prompts; give one, or one each.", "sampling_params")
    return list(params)


def as_priorities(priority: Any, count: int) -> list[int]:
    """Return the priority of each of ``count`` prompts; None: 0. Raises BadRequest."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, (list, tuple)) or not all(_is_id(one) for one in priority):
        raise BadRequest(f"priority is {_kind(priority)}; give a list with a whole number for each prompt.", "priority")
    if len(priority) != count:
        raise BadRequest(f"{len(priority)} priorities for {count} prompts; give one each.", "priority")
    return list(priority)


def as_conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Return one conversation or several as a list. Raises BadRequest."""
    shape = "a list of {'role': …, 'content': …}, or a list of such lists"
    if not isinstance(messages, (list, tuple)):
        raise BadRequest(f"messages is {_kind(messages)}; give {shape}.", "messages")
    if not messages:
        raise BadRequest("messages is empty; give at least one.", "messages")
    several = [messages] if isinstance(messages[0], Mapping) else messages
    for number, conversation in enumerate(several):
        where = "messages" if several is not messages else f"messages[{number}]"
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise BadRequest(f"{where} is {_kind(conversation)}; messages is {shape}.", "messages")
        for place, message in enumerate(conversation):
            _check_message(f"{where}[{place}]", message)
    return [list(conversation) for conversation in several]


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} is {_kind(message)}; give {{'role': …, 'content': …}}.", "messages")
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} has no role that is a string; give 'user', 'assistant' or 'system'.", "messages")
    content = message.get("content")
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise BadRequest(f"{where}: content is {_kind(content)}; give a string or a list of parts.", "messages")


def check_template_arguments(options: Mapping[str, Any]) -> None:
    """Check the keywords of ``LLM.chat`` for the chat template. Raises BadRequest naming the first of a wrong type."""
    for name, kinds, words in (
        ("tools", (list, tuple), "a list of tools"),
        ("documents", (list, tuple), "a list of mappings"),
        ("chat_template", (str,), "a Jinja template as a string"),
        ("chat_template_kwargs", (Mapping,), "a mapping of the template's variables"),
        ("mm_processor_kwargs", (Mapping,), "a mapping of settings"),
    ):
        value = options.get(name)
        odd = value if value is not None and not isinstance(value, kinds) else None
        if odd is None and name in ("tools", "documents"):
            odd = next((each for each in value or () if not isinstance(each, Mapping)), None)
        if odd is not None:
            raise BadRequest(f"{name} has {_kind(odd)}; give {words}.", name)
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(options.get(name, False), bool):
            raise BadRequest(f"{name} is {_kind(options[name])}; give True or False.", name)


def check_bar(use_tqdm: Any) -> None:
    """Raise BadRequest unless ``use_tqdm`` is a bool, or a function that makes a bar."""
    if not isinstance(use_tqdm, bool) and use_tqdm is not None and not callable(use_tqdm):
        raise BadRequest(f"use_tqdm is {_kind(use_tqdm)}; give True, False or a function like tqdm.", "use_tqdm")


def as_ids(values: Any) -> list[str]:
    """Return request ids of ``AsyncLLM.abort``, one or several, as a list. Raises BadRequest."""
    ids = [values] if isinstance(values, str) else _as_list(values)
    if ids is None or not all(isinstance(one, str) for one in ids):
        raise BadRequest(f"request_id is {_kind(values)}; give a request's id, or a list of them.", "request_id")
    return ids


def check_kind(name: str, value: Any, kind: type, words: str) -> None:
    """Raise BadRequest unless an argument is of this type. words: description of the accepted values."""
    if not isinstance(value, kind):
        raise BadRequest(f"{name} is {_kind(value)}; give {words}.", name)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: Any) -> list[int] | None:
    """Return a prompt of token ids as a list; None for anything else. An empty list is refused later."""
    values = _as_list(value)
    return values if values is not None and all(_is_id(each) for each in values) else None


def _as_list(value: Any) -> list[Any] | None:
    """Return a list, tuple, array, tensor or generator as a list; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "tolist"):  # numpy and torch
        found = value.tolist()
        return found if isinstance(found, list) else None
    if isinstance(value, (bytes, bytearray, memoryview, set, frozenset)):
        return None
    return list(value) if isinstance(value, (Sequence, Iterable)) else None


def _kind(value: Any) -> str:
    """Describe the type of a wrong value, for a message."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float)):
        return repr(value)[:40]
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
