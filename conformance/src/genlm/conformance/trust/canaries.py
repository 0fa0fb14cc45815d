"""Model folders that try to run code when they are loaded, to test that no backend runs it.

A model folder is a stranger's file. Loading it must run none of its code, unless the user said so
with the engine's own option (``trust_remote_code``).
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from genlm.core.lm import load_model_by_name

#: How a folder's files name the class ``Canary`` in its file ``canary.py``.
REFERENCE = "canary.Canary"
AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMultimodalLM")
AUTO_MAP = {name: REFERENCE for name in AUTO_CLASSES}
CLASS = "CanaryForCausalLM"

ESCAPE = "{{{{ cycler.__init__.__globals__.os.open({mark!r}, 65) }}}}"  # 65 is O_CREAT | O_WRONLY


@frozen
class Canary:
    """A model folder with a trap.

    Attributes:
        name: Where in the folder the trap is.
        folder: The folder.
        mark: A file that exists once any code of the folder has run.
    """

    name: str
    folder: Path
    mark: Path

    @property
    def sprung(self) -> bool:
        """Whether code of the folder has run."""
        return self.mark.exists()

    def use(self, backend: str, **options: Any) -> None:
        """Load the folder, ask the model, and render its chat template. None of it need succeed."""
        with (
            contextlib.suppress(Exception),
            load_model_by_name(str(self.folder), backend, options) as lm,
        ):
            lm.next_token_logprobs_sync([1, 2, 3])
            lm.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


@frozen
class _Pickled:
    """Makes the mark when it is unpickled."""

    mark: str

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


def canaries(model: Path, into: Path) -> list[Canary]:
    """Copies of a small model's folder, each with one trap.

    Args:
        model: A folder as transformers saves it, with a fast tokenizer.
        into: An empty folder, for the copies and their marks.
    """
    return [_make(name, trap, model, into) for name, trap in TRAPS.items()]


def pickled_adapter(into: Path) -> Canary:
    """A LoRA adapter whose weights are a pickle with a trap.

    Args:
        into: An empty folder, for it and its mark.
    """
    canary = Canary("pickled adapter", into / "adapter", into / "mark")
    canary.folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (canary.folder / "adapter_config.json").write_text(json.dumps(settings))
    weights = pickle.dumps(_Pickled(str(canary.mark)))
    (canary.folder / "adapter_model.bin").write_bytes(weights)
    return canary


def _make(name: str, trap: Callable[[Path, str], None], model: Path, into: Path) -> Canary:
    place = into / name.replace(" ", "-")
    canary = Canary(name, place / "model", place / "mark")
    shutil.copytree(model, canary.folder)
    code = f"open({str(canary.mark)!r}, 'w').close()\n\n\nclass Canary:\n    pass\n"
    (canary.folder / "canary.py").write_text(code)
    trap(canary.folder, str(canary.mark))
    return canary


def _amend(file: Path, **settings: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **settings}))


def _with(file: str, **settings: Any) -> Callable[[Path, str], None]:
    """A trap of some settings in one of the folder's files."""
    return lambda folder, mark: _amend(folder / file, **settings)


def _nested(folder: Path, mark: str) -> None:
    inner = {**json.loads((folder / "config.json").read_text()), "auto_map": AUTO_MAP}
    _amend(
        folder / "config.json",
        model_type="llava",
        architectures=[CLASS],
        text_config={**inner, "architectures": [CLASS]},
    )


def _processor(folder: Path, mark: str) -> None:
    for file in ("processor_config.json", "preprocessor_config.json"):
        names = ("AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor")
        _amend(folder / file, auto_map={name: REFERENCE for name in names})


def _custom_generate(folder: Path, mark: str) -> None:
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "canary.py", folder / "custom_generate" / "generate.py")
    _amend(folder / "generation_config.json", custom_generate=str(folder))


def _pickled_weights(folder: Path, mark: str) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Pickled(mark)))


def _chat_template(folder: Path, mark: str) -> None:
    template = ESCAPE.format(mark=mark)
    _amend(folder / "tokenizer_config.json", chat_template=template)
    (folder / "chat_template.jinja").write_text(template)


TRAPS: dict[str, Callable[[Path, str], None]] = {
    "auto_map of a known type": _with("config.json", auto_map=AUTO_MAP),
    "auto_map of an unknown class": _with("config.json", auto_map=AUTO_MAP, architectures=[CLASS]),
    "auto_map of an unknown type": _with(
        "config.json", auto_map=AUTO_MAP, architectures=[CLASS], model_type="canary"
    ),
    "auto_map of a nested configuration": _nested,
    "model_file": _with("config.json", model_file="canary.py"),
    "tokenizer": _with(
        "tokenizer_config.json",
        tokenizer_class="CanaryTokenizer",
        auto_map={"AutoTokenizer": [REFERENCE, REFERENCE]},
    ),
    "processor": _processor,
    "custom_generate": _custom_generate,
    "pickled weights": _pickled_weights,
    "chat template": _chat_template,
}
