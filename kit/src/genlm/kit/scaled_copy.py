"""The scaled copy: a small model of the same class, whose thresholds are a few tokens away.

A model may change its attention beyond a length: by a window, a temperature, or a choice of
positions. Short contexts never reach that length on the model, but do on the scaled copy.

Comparing the model's own first row beyond each threshold with a cold row would find less:

- Doge's first row beyond the threshold is right, and the next ones are wrong.
- If no state is kept, there is nothing to compare: Reformer's rows, which are random, would pass.
- In half precision, rounding hides differences. It may be 2 nats; if a temperature of attention of
  1.07 is ignored, nearly all rows of SmolLM2-135M change by less. So a scaled copy is in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from attrs import frozen

#: Options whose values are lengths or distances from which positions are treated differently.
THRESHOLD = re.compile(
    r"(^|_)window(_size|_len)?$|^(mamba_|attention_)?chunk_size$|attn_chunk_length$|floor"
    r"|^index_topk|^(index_)?block_size$|^local_attention$|^original_max_position|max_distance$"
    r"|^compress_r|^max_inference_chunksize$"
)

#: Options whose values are widths. All widths of a model shrink by one factor, so that sums and
#: products of widths still match.
WIDTH = re.compile(
    r"hidden_size|embedding_size$|head_size$|state_size$|feed_forward_size|(^|_)dim(_|$)|headdim$"
    r"|_rank$|_width$|^kv_channels$|^d_(model|inner|kv)$|^n_(embd|inner)$|d_head$|d_state$"
)

#: Widths on which no other width depends.
INNER_WIDTH = re.compile(r"intermediate_size|ffn_size|ffn_hidden_size|ffn_dim$|^d_ff$")

#: Options whose value is the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

#: Options that list the layers of one kind.
LAYER_NUMBERS = re.compile(r"^(attn|hybrid|local)_layer_(indices|ids)$")

#: Options that do not apply to a scaled copy.
LEFT_OUT = ("quantization_config", "dtype", "torch_dtype", "attn_implementation")

#: The factors by which a scaled copy may be narrower than the model, in the order in which they are
#: tried.
FACTORS = (64, 32, 16, 8, 4, 2, 1)

#: How far biases, norms and other vectors are moved from their initial values.
VECTOR_CHANGE = 0.1

#: The size of a scaled copy's vocabulary, and the most weights that it may have.
VOCABULARY_TOKENS, MAX_WEIGHTS = 64, 64_000_000


@frozen
class Threshold:
    """A number of positions in a configuration.

    Attributes:
        path: Its place in the configuration: the keys of the nested mappings.
        value: The number.
    """

    path: tuple[str, ...]
    value: int


def thresholds(settings: Mapping[str, Any]) -> list[Threshold]:
    """The thresholds in the mapping of a configuration."""
    return [
        Threshold(path, value)
        for path, value in _numbers(settings)
        if THRESHOLD.search(path[-1]) and value > 0
    ]


def small_config(config: Any, factor: int, changed: Mapping[tuple[str, ...], int]) -> Any:
    """A configuration of the same class with few layers, narrow by ``factor``.

    Args:
        config: The model's configuration.
        factor: The number by which all widths are divided.
        changed: New values of thresholds, by their paths.

    Raises:
        ValueError: a width cannot be divided by ``factor``.
    """
    settings = _smaller(config.to_dict(), factor)
    for path, value in changed.items():
        inner = settings
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    return type(config).from_dict(settings)


def small_model(
    kind: Any,
    config: Any,
    device: torch.device,
    changed: Mapping[tuple[str, ...], int],
    factors: Sequence[int] = FACTORS,
) -> Any:
    """A random model in float32, of a configuration like :func:`small_config`'s.

    Args:
        kind: The class or function that makes a model of a configuration.
        config, changed: See :func:`small_config`.
        device: Where the model is made.
        factors: How much narrower the model may be, the best factor first.

    Raises:
        ValueError: none could be made. The message says why.
    """
    reasons = []
    for factor in factors:
        try:
            return _random(kind, small_config(config, factor, changed), device)
        # A class may raise any exception for sizes that it does not expect.
        except Exception as error:
            reasons.append(f"{factor} times narrower: {type(error).__name__}: {error}"[:200])
    raise ValueError("; ".join(reasons[-2:]))


def _random(kind: Any, config: Any, device: torch.device) -> Any:
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in kind(deepcopy(config)).parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"it would have {weights:,} weights")
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.no_grad():
        torch.manual_seed(0)
        scaled = kind(config).float().to(device).eval()
        for parameter in scaled.parameters():
            # Large weights make rows far from uniform, so that a mix-up shows.
            if parameter.ndim > 1:
                parameter.normal_(0, max(parameter.shape[-1], 8) ** -0.5)
            else:  # biases and norms begin as 0 and 1, so that a lost one would not show
                parameter.add_(torch.randn_like(parameter), alpha=VECTOR_CHANGE)
        rows = scaled(torch.arange(6, device=device)[None], use_cache=False).logits
    if not rows.isfinite().all():
        raise ValueError("its rows are not finite")
    return scaled


def _smaller(settings: Mapping[str, Any], factor: int) -> dict[str, Any]:
    layers = next((settings[name] for name in LAYERS if _is_number(settings.get(name))), 0)
    kept = _kinds_of_layers(settings, layers) if layers else []
    smaller: dict[str, Any] = {}
    for name, value in settings.items():
        if name in LEFT_OUT:
            continue
        if name == "per_layer_config" and isinstance(value, dict):
            others = {int(at): layer for at, layer in value.items()}
            smaller[name] = {n: others[at] for n, at in enumerate(kept) if at in others}
        elif kept and _numbers_layers(name, value):
            smaller[name] = [n for n, at in enumerate(kept) if at in value]
        elif kept and isinstance(value, list) and len(value) == layers:
            smaller[name] = [value[at] for at in kept]
        elif name in LAYERS and _is_number(value):
            smaller[name] = len(kept)
        else:
            smaller[name] = _narrower(name, value, factor)
    return smaller


def _narrower(name: Any, value: Any, factor: int) -> Any:
    """One setting; its name is a number where it is a label."""
    if not isinstance(name, str):
        return value
    if isinstance(value, dict):
        return _smaller(value, factor)
    if isinstance(value, list) and name == "mrope_section":
        return [part // factor for part in value]
    if isinstance(value, list) and name.endswith("_factor"):
        return value[::factor]
    if name.endswith("token_id"):
        return _token(value)
    if not _is_number(value):
        return value
    if "vocab_size" in name:
        return VOCABULARY_TOKENS
    if INNER_WIDTH.search(name):
        return max(value // factor, min(value, 8))
    if WIDTH.search(name) and value >= factor:
        if value % factor:
            raise ValueError(f"{name}={value} is not a multiple of {factor}")
        return value // factor
    return value


def _kinds_of_layers(settings: Mapping[str, Any], layers: int) -> list[int]:
    """One layer of every kind, and two at least."""
    lists = [
        [at in value for at in range(layers)] if _numbers_layers(name, value) else value
        for name, value in settings.items()
        if isinstance(value, list)
    ]
    by_layer = [value for value in lists if len(value) == layers]
    others = {int(at): layer for at, layer in (settings.get("per_layer_config") or {}).items()}
    by_layer.append([others.get(at) for at in range(layers)])
    first: dict[str, int] = {}
    for at in range(layers):
        first.setdefault(repr([value[at] for value in by_layer]), at)
    kept = set(first.values())
    return sorted(kept if len(kept) > 1 else {0, layers - 1})


def _numbers_layers(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, list) and bool(LAYER_NUMBERS.search(name))


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(one) for one in value]
    return min(value, VOCABULARY_TOKENS - 1) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(
    settings: Mapping[str, Any], above: Sequence[str] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in settings.items():
        if not isinstance(name, str):  # a dictionary with numbered labels
            continue
        if isinstance(value, dict):
            yield from _numbers(value, [*above, name])
        elif _is_number(value):
            yield (*above, name), value
