"""The module that the entry point ``hf`` names. Importing it imports neither torch nor
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine
from genlm.kit.model_files import require_model


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="Hugging Face transformers, on any device PyTorch has",
        engine="transformers",
        needs=("torch", "transformers"),
        preference=0,
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object], verify: Any) -> Engine:
    """Load a model folder, a folder with a GGUF file, or a hub name; the options are those of
    ``HFOptions``."""
    from genlm.hf.options import HFOptions

    parsed = HFOptions.parse(options)
    # With these options, the files may be elsewhere than in the usual place.
    if not {"subfolder", "cache_dir"} & parsed.hf_opts.keys():
        require_model(model, ("config.json", "*.gguf"))
    from genlm.hf.engine import HFEngine
    from genlm.hf.loading import load_pretrained
    from genlm.hf.verified import subject_of
    from genlm.kit.verify.loading import load_verified

    def load(name: str) -> HFEngine:
        hf_model, hf_tokenizer = load_pretrained(name, parsed)
        return HFEngine(hf_model, hf_tokenizer, parsed)

    return load_verified(subject_of(model, options, parsed), verify, load)
