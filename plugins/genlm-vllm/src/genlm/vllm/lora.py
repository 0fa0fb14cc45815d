"""LoRA: the hooks of an engine that was loaded with ``enable_lora``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from genlm.core.checks import describe_error
from genlm.core.errors import GenlmError, InvalidAdapterError, InvalidOptionError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Adapter, ScoreRequest
from genlm.kit.adapter_files import (
    WEIGHTS,
    AdapterFolder,
    Feature,
    presumed_shapes,
    read_adapter,
    read_header,
    read_tensor,
    shapes_in_transformers,
    write_plain,
)
from genlm.kit.checkpoints import weight_files
from genlm.vllm.engine import VllmEngine

#: Features that are applied correctly once an adapter is converted to plain LoRA.
APPLIED = frozenset({
    Feature.RSLORA, Feature.RANKS, Feature.ALPHAS, Feature.EMBEDDING, Feature.HEAD,
    Feature.SAVED_EMBEDDINGS,
})  # fmt: skip

#: The name of the language model within multimodal models.
OF_TEXT = {"language_model", "text_model"}


class LoraEngine(VllmEngine):
    """An engine with adapters.

    vLLM gets each adapter as plain LoRA in a folder of its own. The folder exists for as long as
    the adapter, because vLLM may read it again.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._folders: dict[int, tempfile.TemporaryDirectory[str]] = {}

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder:
        """Raises: InvalidAdapterError: the adapter is invalid, or of a kind that vLLM applies
        wrongly."""
        read = read_adapter(adapter.path)
        read.require(APPLIED, "vLLM")
        return read

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder) -> bool:
        """Raises: InvalidAdapterError: the adapter is made for another model. InvalidOptionError:
        vLLM already has as many adapters as it keeps.
        """
        # With more adapters, vLLM would silently drop one. When that is used again, vLLM would read
        # whatever is then at its path.
        if len(self._folders) >= (most := self._core.max_loras):
            raise InvalidOptionError(
                f"{len(self._folders)} LoRA adapters are loaded and max_cpu_loras is {most}; "
                "remove one, or load the model with a larger max_cpu_loras in engine_opts"
            )
        contents.require_modules(self._shapes or presumed_shapes(contents, self._core.hf_config))
        self._require_same_embeddings(contents)
        folder = tempfile.TemporaryDirectory(prefix="genlm-adapter-")
        try:
            write_plain(_of_text(contents), Path(folder.name))
            self._core.add_lora(adapter, folder.name)
        except Exception as error:
            self._core.remove_lora(adapter)
            folder.cleanup()
            if isinstance(error, ValueError) and not isinstance(error, GenlmError):
                raise InvalidAdapterError(
                    f"vLLM cannot apply LoRA adapter {adapter.path} to this model "
                    f"({' '.join(describe_error(error).split()):.300}); merge it into the model's "
                    "weights, or load the model with backend='hf'"
                ) from error
            raise
        self._folders[adapter.version] = folder
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self._release(self._sessions.drop(adapter))
        self._core.remove_lora(adapter)
        self._folders.pop(adapter.version).cleanup()
        return True

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]] | None:
        return shapes_in_transformers(self._core.hf_config)

    def _require_same_embeddings(self, adapter: AdapterFolder) -> None:
        """Check the copies of the output layer and the embedding that PEFT saves if LoRA changes
        them; they may belong to another model.

        Raises:
            InvalidAdapterError: a copy belongs to another model, or the model has no folder to
                compare it with.
        """
        for name, saved in adapter.saved_copies.items():
            weight = _saved_weight(Path(self._core.model_path), name)
            copy = read_tensor(adapter.path / WEIGHTS, saved)
            if (
                weight is None
                or weight.shape != copy.shape
                or not torch.allclose(copy.float(), weight.float(), rtol=2**-7, atol=1e-6)
            ):
                raise InvalidAdapterError(
                    f"LoRA adapter {adapter.path} holds {name} of shape {list(copy.shape)}, which "
                    f"is not that of {self._core.model_path}; give the base model's folder that it "
                    "was trained on, or save the adapter with save_embedding_layers=False"
                )

    def _cheaper_as_requests(self, scores: Sequence[ScoreRequest]) -> list[ScoreRequest]:
        """No score is cheaper as a request, so all scores are made from rows: in vLLM (to 0.32),
        LoRA layers treat a prompt's logits as those of a batch's last positions."""
        return []


def _of_text(adapter: AdapterFolder) -> AdapterFolder:
    """The adapter without the parts outside the language model, if that has a name of its own. vLLM
    has not loaded these parts, and they do not affect text."""
    modules = adapter.modules
    names = {name for name in modules if OF_TEXT & {*name.split(".")}}
    if not names:
        return adapter
    names |= {name for name in modules if name.endswith("lm_head")}
    return evolve(adapter, modules={name: modules[name] for name in modules if name in names})


def _saved_weight(folder: Path, name: str) -> torch.Tensor | None:
    """A weight of a model folder; for tied output layers, the embedding's."""
    for wanted in (name, "model.embed_tokens.weight"):
        for file in weight_files(folder):
            if file.suffix != ".safetensors":
                continue
            if wanted in (header := read_header(file)):
                return read_tensor(file, header[wanted])
    return None
