"""The base class of language models."""

from genlm.backend._removed import ADAPTERS, BATCHED, removed_names
from genlm.core import AsyncLM as AsyncLM
from genlm.core import MockAsyncLM as MockAsyncLM
from genlm.core import decode_vocab as decode_vocab

__getattr__ = removed_names(
    __name__,
    {
        "BatchAbandoned": "use genlm.core.QueriesResetError, or genlm.core.ModelClosedError",
        "batch_abandoned": BATCHED,
        "fail_futures": BATCHED,
        **ADAPTERS,
    },
)
