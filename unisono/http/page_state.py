"""The JSON object that the page polls: the model, running requests, latencies, caches, speculation and passes.

Built from the engine's last samples and the API process's own counters, so it is available while the engine is busy.
``routes/page.py`` serves it as ``GET /page/state``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from unisono.cluster.ipc import MetricSample
from unisono.http.limits.fields import MAX_BODY_BYTES
from unisono.http.service import Service

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff")
"""Content types of images that every server with a vision model reads."""
QUESTIONS = (
    "Why is the sky blue? Answer in three sentences.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Compare tea and coffee in a small table.",
)
PICTURE_QUESTIONS = (
    "Describe this picture.",
    "Which numbers do you see in this picture?",
    "How many red things are in this picture?",
)
BUNDLED_QUESTIONS = (
    "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45 on a gift. How much money does Mia have "
    "left?",
    "Diego sells 7 toy cars for $18 each. He spends $67 and then gets $14 from Rosa. How much money does he have?",
    "Alan has 9 years more than Noah, and Noah has four times the years of Maria, who is 9. How old is Alan?",
)
BUNDLED_PICTURE_QUESTIONS = ("Add the orange and the red shapes.", "What is at the top-left?", "Describe the picture.")
"""Suggestions for an empty conversation. The bundled models only know word problems and small scenes."""


def page_state(
    service: Service, info: Mapping[str, Any], samples: Sequence[MetricSample], fresh: bool
) -> dict[str, Any]:
    """The page's state.

    Args:
        service: the server.
        info: ``Engine.info()``, the latest known.
        samples: the engine's latest metrics.
        fresh: False if the engine did not answer in time and ``info`` and ``samples`` are older.
    """
    speculation, counters = info.get("speculation", {}), info.get("counters", {})
    cache = info.get("kv_cache", {})
    refusal = service.refusal()
    return {
        "fresh": fresh,
        "refusal": None if refusal is None else str(refusal),
        "model": _model(service),
        "requests": _requests(service, samples),
        "tokens": {"prompt": _sum(samples, "prompt_tokens"), "generated": _sum(samples, "generation_tokens")},
        "kv_cache": {
            "usage": _mean(samples, "kv_cache_usage_perc"),
            "pages": cache.get("pages"),
            "cached_pages": cache.get("cached_pages"),
        },
        "prefix_cache": {
            "queries": _sum(samples, "prefix_cache_queries"),
            "hits": _sum(samples, "prefix_cache_hits"),
        },
        "speculation": {
            "drafter": speculation.get("drafter", "none"),
            "accept_length": speculation.get("avg_spec_accept_length") if counters.get("draft_rounds") else None,
            "acceptance_per_position": speculation.get("acceptance_per_position", []),
            "accepted_per_position": counters.get("accepted_per_position", []),
        },
        "passes": [
            {**{name: one.labels[name] for name in ("program", "kind", "reason")}, "count": one.value}
            for one in samples
            if one.name == "passes" and one.value
        ],
        "latency": service.metrics.history.latencies(),
    }


def _model(service: Service) -> dict[str, Any]:
    """The served names, the context, the images that a prompt may have, and questions to try."""
    inputs = service.serving.inputs
    settings = inputs.media.settings
    most = settings.limit_mm_per_prompt["image"] if inputs.media.vision is not None else 0
    pictures = {
        "max_count": most,
        "max_bytes": settings.max_bytes,
        "max_pixels": settings.media_max_pixels,
        "max_body_bytes": MAX_BODY_BYTES,
        "types": PICTURE_TYPES,
    }
    return {
        "names": [service.names[0], *service.adapters],
        "max_model_len": inputs.model.max_model_len,
        "pictures": pictures if most else None,
        "questions": questions(service.root, bool(most)),
    }


def questions(root: str, pictures: bool) -> Sequence[str]:
    """Three questions to try. root: the checkpoint's directory. pictures: the model takes images."""
    if Path(root).parent == Path(str(files("unisono") / "bundled")):
        return BUNDLED_PICTURE_QUESTIONS if pictures else BUNDLED_QUESTIONS
    return PICTURE_QUESTIONS if pictures else QUESTIONS


def _requests(service: Service, samples: Sequence[MetricSample]) -> dict[str, int]:
    """Number of running and of waiting sequences.

    A sequence whose answer has begun runs, even if the engine's samples are older than its first token. Every other
    accepted sequence waits.
    """
    begun = sum(one.streaming for answer in service.running.values() for one in answer)
    running = max(begun, int(_sum(samples, "num_requests_running")))
    waiting = max(int(_sum(samples, "num_requests_waiting")), service.admission.sequences - running)
    return {"running": running, "waiting": waiting}


def _sum(samples: Sequence[MetricSample], name: str) -> float:
    return sum(one.value for one in samples if one.name == name)


def _mean(samples: Sequence[MetricSample], name: str) -> float:
    """Mean over engines."""
    values = [one.value for one in samples if one.name == name]
    return sum(values) / len(values) if values else 0.0
