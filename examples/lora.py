"""LoRA per request: make an adapter with PEFT, then ask it and the base model in one gather."""

from __future__ import annotations

import argparse
import asyncio
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from genlm.core import AsyncLM, load_model_by_name


def make_adapter(model: str, folder: str, seed: int = 0) -> None:
    """Save an adapter of random weights. A real one would be trained here."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,  # otherwise an untrained adapter would change nothing
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(folder)


async def ask_both(lm: AsyncLM, prompt: str) -> dict[str, torch.Tensor]:
    """The rows of the base model and of the adapter, asked at the same time."""
    ids = lm.tokenizer.encode(prompt)
    base, adapted = await asyncio.gather(
        lm.next_token_logprobs(ids, lora_name=None),
        lm.next_token_logprobs(ids, lora_name="random"),
    )
    return {"base model": base, "adapter": adapted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompt", default="The capital of France is")
    options = parser.parse_args()

    with (
        tempfile.TemporaryDirectory() as folder,
        load_model_by_name(options.model, backend="hf") as lm,
    ):
        make_adapter(options.model, folder)
        lm.add_new_lora(folder, "random")
        for name, row in asyncio.run(ask_both(lm, options.prompt)).items():
            best = [lm.byte_vocab[i] for i in row.topk(3).indices.tolist()]
            shown = "  ".join(f"{t.byte_string!r} {row[t.token_id].exp():.3f}" for t in best)
            print(f"{name:10}  {shown}")
        print(f"{lm.stats.rows} rows in {lm.stats.batches} batches")


if __name__ == "__main__":
    main()
