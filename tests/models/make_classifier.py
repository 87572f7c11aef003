"""Random small classifiers, written by transformers as a hub's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.models.fields import COMMON, FAMILIES
from tests.models.make import make_tokenizer, randomise


def make_classifier(directory: Path, family: str, labels: int, **overrides: Any) -> Path:
    """Write a classifier of a model type of FAMILIES with a tokenizer into ``directory`` and return it."""
    fields = {**COMMON, **FAMILIES[family], "num_labels": labels, **overrides}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
