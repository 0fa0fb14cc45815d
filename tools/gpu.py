"""What to run first on a GPU: conformance of hf, the trie, and quick figures against the raw model.

Models have random weights, made from a configuration on the spot: speed does not depend on the
values. ``--device cpu`` goes through the same code, so that it can be tried anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from genlm.core.mock import ByteTokenizer
from genlm.core.trie import TokenCharacterTrie
from genlm.hf import AsyncTransformer

#: Llama shapes: width, layers, heads, key/value heads, inner width.
SHAPES = {
    "tiny": (64, 2, 4, 2, 128),
    "135m": (576, 30, 9, 3, 1536),
    "1b": (2048, 16, 32, 8, 8192),
    "8b": (4096, 32, 32, 8, 14336),
}


class WideTokenizer(ByteTokenizer):
    """A vocabulary as wide as that of a real model."""

    size = 49_152

    def __len__(self) -> int:
        return self.size

    def token_bytes(self) -> list[bytes]:
        return [token_id.to_bytes(3, "big") for token_id in range(self.size)]


def llama(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, kv_heads, inner = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=WideTokenizer.size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def seconds(call: Callable[[], object], device: str, repeat: int) -> float:
    """The median time of a call, with the device's work."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def step_times(
    model: Any, device: str, contexts: int, length: int, repeat: int
) -> dict[str, float]:
    """One token for each of some contexts: ours, and transformers' own decode."""
    generator = torch.Generator().manual_seed(contexts)
    ids = torch.randint(WideTokenizer.size, (contexts, length), generator=generator)
    with AsyncTransformer(model, WideTokenizer(), cache_size=0) as lm:
        grown = ids.tolist()
        lm.batch_next_token_logprobs_sync(grown)

        def ours() -> None:
            for context in grown:
                context.append(len(context) % WideTokenizer.size)
            lm.batch_next_token_logprobs_sync(grown)

        mine = seconds(ours, device, repeat)
    with torch.inference_mode():
        cache = model(ids.to(device), use_cache=True).past_key_values

        def raw() -> None:
            last = torch.zeros(contexts, 1, dtype=torch.long, device=device)
            logits = model(last, past_key_values=cache, use_cache=True).logits
            logits[:, -1].float().log_softmax(-1)

        floor = seconds(raw, device, repeat)
    return {"ours_ms": 1e3 * mine, "raw_ms": 1e3 * floor, "times_raw": mine / floor}


def trie_figures(device: str, rows: int, repeat: int) -> dict[str, float]:
    """Sums over the trie: how much of the weights is read and written in a second, GB."""
    trie = TokenCharacterTrie(WideTokenizer().token_bytes(), device=device)
    weights = torch.rand(rows, WideTokenizer.size, device=device)
    took = seconds(lambda: trie.batch_weight_sum(weights), device, repeat)
    return {"ms": 1e3 * took, "GB_per_s": 4e-9 * rows * (WideTokenizer.size + len(trie)) / took}


def conformance(device: str, dtype: str) -> bool:
    """The suite on a small random model."""
    from tools.smollm2 import default_folder
    from tools.soak import write_tiny_model

    if not default_folder().exists():
        print("gpu: no tokenizer for conformance; run tools/smollm2.py", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(str(default_folder()), Path(folder) / "tiny")
        command = "import sys; from genlm.core.cli import main; sys.exit(main())"
        said = ["conformance", "hf", "--model", model, "--dtype", dtype, "--quick"]
        said += ["--option", f'device="{device}"', "--option", f'dtype="{dtype}"']
        return subprocess.run([sys.executable, "-c", command, *said]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="135m,1b,8b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--contexts", default="1,8,32,128,512")
    parser.add_argument("--lengths", default="20,1000")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--no-conformance", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"))
    options = parser.parse_args()
    device = options.device
    if device != "cpu" and not torch.cuda.is_available():
        print("gpu: skipped, since PyTorch sees no CUDA device; --device cpu tries the same code")
        return
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "figures": []}

    def record(**figures: Any) -> None:
        print(json.dumps(figures), flush=True)
        result["figures"].append(figures)

    sound = True
    if not options.no_conformance:
        for dtype in ("float32",) if device == "cpu" else ("float32", "bfloat16"):
            sound &= (passed := conformance(device, dtype))
            record(what="conformance", dtype=dtype, passed=passed)
    record(what="trie", rows=128, **trie_figures(device, 128, options.repeat))
    for shape in options.shapes.split(","):
        model = llama(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
        for length in map(int, options.lengths.split(",")):
            for contexts in map(int, options.contexts.split(",")):
                try:
                    times = step_times(model, device, contexts, length, options.repeat)
                except torch.OutOfMemoryError:
                    record(what="step", shape=shape, contexts=contexts, length=length, memory=False)
                else:
                    record(what="step", shape=shape, contexts=contexts, length=length, **times)
        del model
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.out)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
