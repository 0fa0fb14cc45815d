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

#: Settings that are applied correctly after an adapter is made plain LoRA.
APPLIED = frozenset({
    Feature.RSLORA, Feature.RANKS, Feature.ALPHAS, Feature.EMBEDDING, Feature.HEAD,
    Feature.SAVED_EMBEDDINGS,
})  # fmt: skip

#: What models that also see call their language model.
OF_TEXT = {"language_model", "text_model"}


class LoraEngine(VllmEngine):
    """An engine with adapters.

    vLLM gets each adapter as plain LoRA in its own folder, which stays as long as the adapter: vLLM
    may read it again.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._folders: dict[int, tempfile.TemporaryDirectory[str]] = {}

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder:
        """Raises: InvalidAdapterError: it is not valid, or of a kind that vLLM applies wrongly."""
        read = read_adapter(adapter.path)
        read.require(APPLIED, "vLLM")
        return read

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder) -> bool:
        """Raises:
        InvalidAdapterError: it is made for another model.
        InvalidOptionError: vLLM already has as many adapters as it keeps.
        """
        # With more, vLLM would silently drop one, and when that is next used, read again what is
        # then at its path.
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
        """With LoRA on the output layer or embedding, PEFT also saves that layer of the model; it
        may be another model's.

        Raises:
            InvalidAdapterError: it is another model's, or there is no folder of the model to
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
        """Scores are made from rows: in vLLM (to 0.32), LoRA layers treat a prompt's logits as
        those of a batch's last positions."""
        return []


def _of_text(adapter: AdapterFolder) -> AdapterFolder:
    """Without what it adds to parts that see or hear, where the language model has a name of its
    own: vLLM has not loaded them, and they change nothing of text."""
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
