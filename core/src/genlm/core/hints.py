"""Hints for names that do not exist: similar names, and the equivalents of other tools' names."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidOptionError, UnsupportedError
from genlm.core.sampling import SamplingOptions

P = ParamSpec("P")
R = TypeVar("R")


def _by_name(table: Mapping[str, str]) -> Mapping[str, str]:
    """A table by single names, from one by all names that share a sentence."""
    return {name: text for names, text in table.items() for name in names.split()}


_ON_TOP = "is for what is built on top of a model; docs/how-to/on-top.md says with what"

#: Arguments of other tools, each with what to use here.
ARGUMENTS = _by_name(
    {
        "adapter adapter_name lora lora_request": (
            "lora_name is the name of an adapter that add_new_lora(path, name) has loaded"
        ),
        "best_of logprobs n num_return_sequences": (
            "lm.sample_particles(ids, n, max_tokens) draws n, each with its log-probabilities"
        ),
        "do_sample": "temperature=0 takes the most likely token every time",
        "frequency_penalty presence_penalty repetition_penalty": f"a penalty {_ON_TOP}",
        "generator": "seed fixes a draw",
        "logit_bias logits_processor": "a hook changes rows; docs/how-to/change-rows.md shows it",
        "max_length max_new_tokens": "max_tokens is the most tokens to draw",
        "num_beams": f"beam search {_ON_TOP}",
        "stop stop_strings": f"a stop string {_ON_TOP}; eos_token_ids ends a draw at tokens",
        "stop_token_ids": "eos_token_ids are the tokens that end a draw",
        "stream": "`async for token_id in lm.stream(ids, max_tokens)` gives them as they are drawn",
        "stride": "context_len is the least context of a token: max_length - stride + 1",
        "temp": "temperature is its name",
        "temperature": "a row has temperature t as (row / t).log_softmax(-1)",
    }
)

_LOADING = "give it when the model is loaded, for instance load_model_by_name(name, {}=...)"

#: Attributes of a model of genlm-backend 0.3, each with what to use here.
LM = _by_name(
    {
        "add_query batch_evaluate_queries queries timer": (
            "batching is inside, so await lm.next_token_logprobs(ids) in as many tasks as you like"
        ),
        "cache": "lm.stats counts its hits, and lm.clear_cache() empties it",
        "device": "row.device is that of a row",
        "llm_engine mlx_lm_model model": "lm.underlying_model is the engine's own model",
        "release_all": "lm.clear_kv_cache() drops the state of every context",
        "walk_cache": "reuse is automatic, and lm.cache_kv(prompt) pins a prompt",
        **{name: _LOADING.format(name) for name in ("batch_size", "prefill_step_size", "timeout")},
    }
)

#: Methods and attributes of other tools, each with what to use here.
METHODS = _by_name(
    {
        "active_adapters list_adapters list_loras lora_adapters loras": (
            "lm.adapters has the adapters that are loaded, by name"
        ),
        "add_adapter add_lora load_adapter load_lora load_lora_adapter load_lora_weights": (
            "lm.add_new_lora(path, name) loads a LoRA adapter, and lora_name=name selects it"
        ),
        "batch_stream stream_sync": "`async for` over lm.stream(ids, max_tokens), a task for each",
        "beam_search": "lm.batch_next_token_logprobs(contexts) gives rows for a step of the beams",
        "bos_token bos_token_id chat_template eos_token pad_token pad_token_id": (
            "lm.tokenizer has it"
        ),
        "batch_decode convert_ids_to_tokens detokenize": "lm.decode(ids) gives text",
        "chat": "lm.apply_chat_template(messages) gives the ids to draw after with lm.sample",
        "config cuda eval generation_config half parameters state_dict to": (
            "lm.underlying_model is the engine's own model; options of the load place it"
        ),
        "delete_adapter delete_lora remove_adapter unload_adapter unload_lora": (
            "lm.remove_lora(name) unloads an adapter"
        ),
        "disable_adapter disable_lora": "lm.clear_lora() makes the base model the default again",
        "dtype torch_dtype": (
            "rows of lm.next_token_logprobs are float32; a backend's option sets the weights'"
        ),
        "empty_cache kv_cache past_key_values reset_kv_cache reset_prefix_cache": (
            "lm.clear_kv_cache() drops the state of every context, lm.cache_kv(prompt) pins one"
        ),
        "enable_lora set_adapter set_adapters set_lora_adapter use_lora": (
            "lm.set_lora(name) makes an adapter the default; lora_name=name selects it in a call"
        ),
        "forward get_logprobs log_prob log_probs logits logprobs next_token_logits": (
            "lm.next_token_logprobs(ids) gives a row"
        ),
        "complete generate": "lm.sample(ids, max_tokens) draws ids",
        "batch_generate generate_batch sample_batch": (
            "lm.batch_sample(list_of_ids, max_tokens) draws after each"
        ),
        "log_likelihood logprob loglikelihood score": (
            "lm.batch_sequence_logprobs(contexts, continuations), or lm.sequence_logprobs for one"
        ),
        "loglikelihood_rolling perplexity": (
            "lm.rolling_logprobs(ids) scores each token of a text, however long it is"
        ),
        (
            "context_length max_length max_model_len max_position_embeddings max_seq_len "
            "max_seq_length model_max_length n_ctx"
        ): "lm.max_context is the longest context",
        "next_token_logprobs_async": "lm.next_token_logprobs is the coroutine",
        "release shutdown stop unload": "lm.close() releases the engine",
        "tokenize": "lm.encode(text) gives ids",
        "vocab get_vocab": "lm.byte_vocab has the bytes of every token, lm.str_vocab its text",
        "n_vocab vocab_size": "len(lm.byte_vocab) is the width of a row",
    }
)

#: Names that users look for in the package, each with its place.
PACKAGE = _by_name(
    {
        "AsyncLLM AutoModel AutoModelForCausalLM LLM load load_llm load_model": (
            "load_model_by_name(name, backend) loads a model"
        ),
        "BytePrefix next_bytes_logprob": "genlm.core.next_bytes has it",
        **{
            name: f"{module} has it, or load_model_by_name(name, {module[6:]!r})"
            for name, module in {
                "AsyncMlxLM": "genlm.mlx",
                "AsyncRayLM": "genlm.ray",
                "AsyncSGLTransformer": "genlm.sgl",
                "AsyncTransformer": "genlm.hf",
                "AsyncVirtualLM": "genlm.vllm",
            }.items()
        },
    }
)

#: Attributes of genlm-backend's trie, each with what to use here.
TRIE = _by_name(
    {
        "M dst_indices ordering src_indices": "trie.weight_sum and trie.weight_max do it all",
        "batch_mass_sum": "trie.batch_weight_sum is its name",
        "jump": "trie.children has the children of every node",
        "mass_sum": "trie.weight_sum is its name",
        "visualize": "trie.draw(ws) draws it as text",
    }
)


def nearest(name: object, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The name that may have been meant: the one most alike, by that share at least."""
    return next(iter(difflib.get_close_matches(str(name), list(known), 1, alike)), None)


def missing_attribute(
    owner: object, name: str, replaced: Mapping[str, str], options: Iterable[str] = ()
) -> AttributeError:
    """The error for an attribute that ``owner`` lacks. It says what replaced an attribute of
    genlm-backend 0.3, where to give an option, or what does the same as another tool's method."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in replaced:
        message = f"{message}, as it had in genlm-backend 0.3: {replaced[name]}"
    elif name in options:
        message = f"{message}: {_LOADING.format(name)}"
    elif replaced is LM and name in METHODS:
        message = f"{message}: {METHODS[name]}"
    else:
        return AttributeError(message, name=name, obj=owner)  # Python adds the nearest name
    return AttributeError(message, name=name, obj=None)  # the nearest name would be a wrong guess


def missing_name(module: ModuleType, name: str) -> AttributeError | ImportError:
    """The error for a name that the package lacks, to be raised by its ``__getattr__``.

    For ``from genlm.core import name``, Python replaces the message of an ``AttributeError``. So if
    a hint is known, an ``ImportError`` is returned in that case.
    """
    message = f"module {module.__name__!r} has no attribute {name!r}"
    if name not in PACKAGE:
        return AttributeError(message, name=name, obj=module)
    message = f"{message}: {PACKAGE[name]}"
    asks = sys._getframe(2).f_code  # the code of importlib, if an import looks up the name
    if asks.co_name == "_handle_fromlist":
        return ImportError(message, name=module.__name__)
    return AttributeError(message, name=name, obj=None)


class Done:
    """The result of a blocking method: nothing, except that awaiting it raises an error with the
    remedy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __await__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self._name} blocks, and has done its work: call it without await (in a coroutine, "
            f"`await asyncio.to_thread(lm.{self._name}, ...)` leaves the event loop free)"
        )

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "None"


def blocks(method: Callable[P, None]) -> Callable[P, None]:
    """Make a method that returns nothing raise an error with the remedy if its result is
    awaited."""

    @functools.wraps(method)
    def blocking(*args: P.args, **options: P.kwargs) -> None:
        method(*args, **options)
        try:
            asyncio.get_running_loop()
        # Nothing can be awaited here, and an interactive interpreter would show a result.
        except RuntimeError:
            return None
        return cast(None, Done(method.__name__))

    return blocking


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a method raise :class:`InvalidOptionError` for unknown and for missing arguments,
    instead of Python's bare ``TypeError``. The arguments of a coroutine are checked when it is
    called. ``**options`` are sampling options."""
    name = function.__name__
    parameters = [*inspect.signature(function).parameters.values()][1:]  # without `self`
    most = 1 + sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named]
    more = SamplingOptions.__annotations__ if len(named) < len(parameters) else ()
    known = list(dict.fromkeys([*named, *more]))
    taken = frozenset(known)

    def refuse(args: Sequence[Any], options: Mapping[str, Any]) -> None:
        for option in options:
            if option not in known:
                near = nearest(option, known)
                hint = ARGUMENTS.get(option) or (f"did you mean {near}?" if near else "")
                message = f"{name} has no argument {option}{hint and f': {hint}'}"
                raise InvalidOptionError(f"{message}; it has {', '.join(known)}")
        if len(args) > most:
            # The parameters that may have been meant, in this order.
            more_by_name = known[most - 1 :]
            hint = f"; write {more_by_name[0]}={safe_repr(args[most])}" if more_by_name else ""
            raise InvalidOptionError(
                f"{name} takes {', '.join(known[: most - 1])} by position; "
                f"got {len(args) - most} more{hint}"
            )
        if len(args) <= len(needed):
            for each in needed[len(args) - 1 :]:
                if each not in options:
                    raise InvalidOptionError(f"{name} needs {each}; it has {', '.join(known)}")

    @functools.wraps(function)
    def refusing(*args: P.args, **options: P.kwargs) -> R:
        if not (len(needed) < len(args) <= most and options.keys() <= taken):
            refuse(args, options)
        return function(*args, **options)

    if sys.version_info >= (3, 12) and inspect.iscoroutinefunction(function):
        inspect.markcoroutinefunction(refusing)
    return refusing
