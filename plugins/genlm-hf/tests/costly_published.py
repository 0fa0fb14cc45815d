"""Folders of published models in hf. These tests are collected only if the file is named."""

from __future__ import annotations

from typing import Any

from tests.published_models import EveryPublishedModel

from .costly_verify import loaded

#: Parts of the messages of models that are rejected.
REJECTED: dict[str, str] = {
    "DeepSeek MoE 16B": "family 'deepseek', which transformers",
    "Falcon 7B of 2023": "family 'RefinedWebModel', which transformers",
    "Phi 3 mini 128k": "'original_max_position_embeddings'",
}


class TestPublishedModels(EveryPublishedModel):
    """With transformers 5.24."""

    load: Any = loaded
    rejected = REJECTED
