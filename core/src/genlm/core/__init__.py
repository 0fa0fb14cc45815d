"""Next-token log-probabilities for probabilistic programs over language models, on any engine."""

import sys
from typing import TYPE_CHECKING

from genlm.core.context import Context
from genlm.core.errors import (
    BackendImportError,
    BackendNotFoundError,
    BackendUnavailableError,
    EngineDeadError,
    EngineError,
    GenlmError,
    InvalidAdapterError,
    InvalidInputError,
    InvalidOptionError,
    InvalidQueryError,
    ModelClosedError,
    ModelNotFoundError,
    PluginError,
    QueriesResetError,
    ReentrancyError,
    UnknownAdapterError,
    UnsupportedError,
    VocabularyError,
    VocabularyItemError,
)
from genlm.core.hints import missing_name
from genlm.core.hookspecs import hookimpl
from genlm.core.lm import AsyncLM, load_model_by_name
from genlm.core.mock import MockAsyncLM
from genlm.core.sampling import Particle
from genlm.core.scoring import Score
from genlm.core.together import together
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.trie import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie
from genlm.core.types import (
    Adapter,
    Answer,
    BackendInfo,
    Engine,
    Query,
    Request,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    Stats,
)

__all__ = [
    "Adapter",
    "Answer",
    "AsyncLM",
    "AsyncTokenCharacterTrie",
    "BackendImportError",
    "BackendInfo",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "Context",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "GenlmError",
    "InvalidAdapterError",
    "InvalidInputError",
    "InvalidOptionError",
    "InvalidQueryError",
    "MockAsyncLM",
    "ModelClosedError",
    "ModelNotFoundError",
    "ParallelTokenCharacterTrie",
    "Particle",
    "PluginError",
    "QueriesResetError",
    "Query",
    "ReentrancyError",
    "Request",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "Stats",
    "Token",
    "TokenCharacterTrie",
    "UnknownAdapterError",
    "UnsupportedError",
    "VocabularyError",
    "VocabularyItemError",
    "decode_vocab",
    "hookimpl",
    "load_model_by_name",
    "together",
]

if not TYPE_CHECKING:  # a type checker must report every missing name

    def __getattr__(name):
        raise missing_name(sys.modules[__name__], name)
