"""Faults in what an engine says of itself, and in what it leaves."""

from __future__ import annotations

import threading

import numpy as np
import torch

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer, MockEngine

from .registry import MUTANTS, Keeping, breaks


class Pins(MockEngine):
    """Says of a pinned prefix what ``change`` makes of it."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        return self.change(super().genlm_cache_prefix(query))


MUTANTS.changes(
    Pins,
    ("PrefixRefusedQuietly", "engine_keeps_its_contract", lambda e, pinned: not pinned),
    # The suite sees an engine without the hook.
    ("PrefixPinnedWithoutAWord", "engine_keeps_its_contract", lambda e, pinned: None),
)


@breaks("bytes_of_text", "https://github.com/cactus-compute/cactus/issues/684")
class BytesAboveAsciiAsText(MockEngine):
    """Byte tokens stand for their hexadecimal name instead of the byte."""

    class Named(ByteTokenizer):
        def token_bytes(self):
            right = super().token_bytes()
            return [*right[:0x80], *(b"<0x%02X>" % i for i in range(0x80, 0x100)), *right[0x100:]]

    def __init__(self, tokenizer, **options):
        super().__init__(self.Named(), **options)


@breaks("two_models_in_one_process", "https://github.com/ml-explore/mlx-lm/issues/1776")
class OneModelClearsTheOther(MockEngine):
    """Two models in one process share state: what one drops is gone in the other."""

    everybody: dict = {}  # noqa: RUF012

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.adapters = self.everybody


@breaks("nothing_grows", "https://github.com/vllm-project/vllm/pull/14326")
class KeepsEveryRow(Keeping, MockEngine, kept=list):
    """Rows are kept until the model is closed."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        self.kept.append(rows.clone())
        return rows


@breaks("nothing_grows")
class KeepsEveryDraw(Keeping, MockEngine, kept=list):
    """The state of each sample is kept in NumPy's memory."""

    @hookimpl
    def genlm_sample(self, queries, params):
        self.kept += [np.ones(1 << 15) for _ in queries]
        return super().genlm_sample(queries, params)


@breaks("removed_adapters_leave_nothing")
class KeepsRemovedWeights(Keeping, MockEngine, kept=list):
    """An adapter's weights stay when it is removed."""

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.kept.append(torch.ones(1000))
        return super().genlm_add_lora(adapter)


@breaks("nothing_is_left_after_close")
class RowsOutliveTheModel(KeepsEveryRow):
    """Also after that."""

    everything: list = []  # noqa: RUF012

    @hookimpl
    def genlm_close(self):
        super().genlm_close()
        self.everything.append(self.kept)


@breaks("nothing_is_left_after_close", "https://github.com/vllm-project/vllm/issues/8933")
class ThreadOutlivesTheModel(MockEngine):
    """A worker thread is not stopped, and holds the weights."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        weights = torch.zeros(100_000)
        work = lambda: threading.Event().wait() or weights  # noqa: E731
        threading.Thread(target=work, daemon=True, name="worker").start()
