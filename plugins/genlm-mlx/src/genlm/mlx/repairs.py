"""Corrects what mlx-lm 0.32 computes wrongly, in a model that it has loaded."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import falcon_h1, gemma2, gemma3_text, minicpm, minicpm3, switch_layers

import mlx.core as mx


class Gemma2Attention(gemma2.Attention):  # type: ignore[misc]
    """Gemma 2's attention with masks that differ by sequence.

    With several query heads for each key/value head, mlx-lm's scores have five axes,
    ``[batch, kv_heads, repeats, new, all]``. It aligns the mask of a batch,
    ``[batch, 1, new, all]``, with the last four: sequences meet key/value heads, which fits by
    accident if there are as many of both.
    """

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mx.expand_dims(mask, 2)
        return super().__call__(x, mask, cache)


class Gemma3Embedding:
    """Embeddings that Gemma 3 multiplies with the root of their size in their own type.

    mlx-lm rounds the root to bfloat16 for all types. This class multiplies the embeddings with the
    missing factor, which is 1 for bfloat16 or if the root is exact.
    """

    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = super().__call__(x)  # type: ignore[misc]
        root = found.shape[-1] ** 0.5
        wanted, had = (mx.array(root, kind).item() for kind in (found.dtype, mx.bfloat16))
        return found if wanted == had else (found * (wanted / had)).astype(found.dtype)


class MiniCPM:
    """MiniCPM with tied embeddings. mlx-lm divides the input of the output layer only if that has
    weights of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        found: mx.array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return found / (self.args.hidden_size / self.args.dim_model_base)  # type: ignore[attr-defined]


class Scaled:
    """A linear layer of Falcon-H1 with a factor that mlx-lm leaves out. The factor is not
    multiplied into the weights, since a program may load others.

    Attributes:
        before: The factor of the inputs.
        after: The factor of the outputs, including the bias.
    """

    before: float
    after: float

    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = super().__call__(x * self.before)  # type: ignore[misc]
        return found * self.after


class Experts(switch_layers.SwitchLinear):  # type: ignore[misc]
    """Experts whose products are computed in float32, the only type in which MLX computes them on
    the CPU."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if self.weight.dtype != mx.float32:  # the program has loaded weights of another type
            self.set_dtype(mx.float32)
        return super().__call__(x.astype(mx.float32), *args, **kwargs).astype(x.dtype)


def repair(model: Any) -> None:
    """Correct the model in place, so that rows are right."""
    if isinstance(model, minicpm.Model | minicpm3.Model) and model.args.tie_word_embeddings:
        kind = type(model)
        model.__class__ = type(kind.__name__, (MiniCPM, kind), {})
    if isinstance(model, falcon_h1.Model):
        for name, module in model.named_modules():
            if (factor := _left_out(model, name)) != 1:
                kind = type(module)
                module.__class__ = type(kind.__name__, (Scaled, kind), {})
                after = name.endswith("k_proj")
                module.before, module.after = (1.0, factor) if after else (factor, 1.0)
    for _, module in model.named_modules():
        # Only the class changes, so parameters, and the names by which adapters find them, stay.
        if type(module) is gemma2.Attention:
            module.__class__ = Gemma2Attention
        if type(module) is switch_layers.SwitchLinear and mx.default_device() == mx.cpu:
            module.set_dtype(mx.float32)
            module.__class__ = Experts
        if type(module) is gemma3_text.Gemma3Model:
            kind = type(module.embed_tokens)
            module.embed_tokens.__class__ = type(kind.__name__, (Gemma3Embedding, kind), {})


def folded(model: Any, name: str, outputs: int) -> Any:
    """The factor by which the outputs of a linear layer differ from transformers', because mlx-lm
    multiplies it into the weights, or :func:`repair` into the layer: a number, or ``[outputs]``.

    transformers' Falcon-H1 multiplies the values that go through its layers; mlx-lm multiplies the
    weights instead. Converting weights of 1 shows the factor.
    """
    if not isinstance(model, falcon_h1.Model):
        return 1.0
    unconverted = {"model.layers.0.mamba.conv1d.weight": mx.zeros((1, 1, 2))}
    ones = {f"{name}.weight": mx.ones((outputs, 1))}
    weights = model.sanitize({**unconverted, **ones})
    return weights[f"{name}.weight"][:, 0] * _left_out(model, name)


def _left_out(model: Any, name: str) -> float:
    """The factor that mlx-lm leaves out in a layer of Falcon-H1. It looks for the factor of keys
    under another name, and has none for values."""
    if name.endswith("self_attn.k_proj"):
        return float(model.args.key_multiplier)
    if name.endswith("self_attn.v_proj"):
        return float(model.args.attention_in_multiplier)
    return 1.0
