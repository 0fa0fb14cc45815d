"""The runner: one forward of the model, logits for the wanted positions only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import Parameter
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from genlm.core.types import Adapter
from genlm.hf.adapters import AdapterSet
from genlm.hf.attention import LAYOUT_ARGUMENT, SLOT_ATTENTION
from genlm.hf.cudnn import attention_kernels
from genlm.hf.forward_hooks import ForwardHooks
from genlm.hf.layout import Chunks, PackedLayout, UniformLayout
from genlm.hf.patterns import Pattern
from genlm.hf.pool import SlotPool
from genlm.hf.positions import DynamicRope
from genlm.hf.static_layout import StaticInputs, StaticLayout
from genlm.hf.upload import Indices, Upload

#: The argument and result under which models take and return the cache. From transformers 5.24 on,
#: it is the first.
CACHE_NAMES = ("cache", "cache_params", "past_key_values")


class Runner:
    """Runs forwards.

    Only the wanted positions reach the output layer: a hook before it selects them. The vocabulary
    is so wide that rows for every position would cost more time and memory than the rest of a small
    model.

    Args:
        model: The causal language model.
        adapters: Its adapters.
        pool: Where key/value state goes.
        patterns: What each layer attends to; needed for packed forwards only.

    Attributes:
        device: Where the model's first weight is.
        modules: All modules of the model.
        hooks: The forward hooks on them.
        changes: How often modules may have been replaced.
        without_gradients: The mode of PyTorch in which forwards are computed. Inference mode is the
            fastest, but some classes of weights do not work in it.
    """

    def __init__(
        self, model: Any, adapters: AdapterSet, pool: SlotPool, patterns: Sequence[Pattern] | None
    ) -> None:
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        # Asked once, because the model searches for its first weight each time.
        self.device: torch.device = model.device
        self._adapters = adapters
        self.pool = pool
        self.without_gradients: Callable[[], AbstractContextManager[Any]] = torch.inference_mode
        self._patterns = patterns
        self.changes = 0
        self._wanted: torch.Tensor | None = None
        self._selected = False  # whether the hook has selected the wanted positions
        takes = inspect.signature(model.forward).parameters
        # The wrappers of torch.compile and PEFT name no arguments and pass everything on.
        inner = inspect.signature(served_model(model).forward).parameters
        named_so = (name for each in (takes, inner) for name in CACHE_NAMES if name in each)
        self._cache_name = next(named_so, CACHE_NAMES[-1])
        # Recurrent models may have no such argument.
        self._takes_positions = "position_ids" in takes
        # A user's own model may take token ids only, under a name of its own or by position.
        kinds = {name: each.kind for name, each in takes.items()}
        others = Parameter.VAR_KEYWORD in kinds.values()
        self._takes_use_cache = others or "use_cache" in takes
        named = kinds.get("input_ids", Parameter.POSITIONAL_ONLY)
        self._ids_by_name = others or named is not Parameter.POSITIONAL_ONLY
        self._asked: dict[str, Any] = {"use_cache": True}
        if getattr(model.config, "return_dict", True) is False:
            self._asked["return_dict"] = True
        self._rope = DynamicRope(model)
        self._hook: Any = None
        self._hook_head()

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()

    @contextmanager
    def head_may_change(self) -> Iterator[None]:
        """Inside the block, adapters may be added and removed. That may wrap the output layer, or
        copy it with its hooks, so the plugin's hook on it is set anew afterwards."""
        self.close()
        try:
            yield
        finally:
            self._hook_head()

    def _hook_head(self) -> None:
        head = self._model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._select) if head is not None else None
        # Listed once, since a walk over the model takes as long as a layer.
        self.modules = [*self._model.modules()]
        self.hooks = ForwardHooks(self.modules)
        self.hooks.look(self.is_ours)
        self.changes += 1

    def packed(
        self,
        chunks: Chunks,
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Run chunks of any start and size at once.

        Args:
            chunks: What to compute.
            tokens: All their tokens, in the same order.
            adapters: One per chunk.
            wanted: Indices into ``tokens``.

        Returns:
            ``[len(wanted), vocab_size]`` logits.
        """
        patterns = self._prepare_slot_attention()
        upload, device = Upload(), self.device
        layout = PackedLayout(chunks, patterns, upload, device)
        self.pool.layout = layout
        ids, places = upload.add(tokens), upload.add(wanted)
        return self._forward(
            [*chain.from_iterable(map(repeat, adapters, chunks.sizes))],
            places,
            input_ids=ids.on(device)[:, None],
            position_ids=layout.positions.on(device)[:, None],
            # A mask of four dimensions keeps the model from making one; attention takes the
            # layout's mask.
            attention_mask=torch.zeros(len(tokens), 1, 1, 1, dtype=torch.bool, device=device),
            **{self._cache_name: self.pool, LAYOUT_ARGUMENT: layout},
        )

    def static(self, inputs: StaticInputs, width: int, adapter: Adapter | None) -> torch.Tensor:
        """Run one token in each of some slots. The operators, and the memory that they use, depend
        only on the number of rows, on ``width`` and on the adapter.

        Args:
            inputs: The tokens, their positions and their slots.
            width: How many columns of each slot are read.
            adapter: The adapter of all rows.

        Returns:
            ``[rows, vocab_size]`` logits.
        """
        layout = StaticLayout(inputs, self._prepare_slot_attention(), width)
        self.pool.layout = layout
        return self._forward(
            [adapter],
            None,
            input_ids=inputs.ids[:, None],
            position_ids=inputs.positions[:, None],
            attention_mask=inputs.unused_mask,
            **{self._cache_name: self.pool, LAYOUT_ARGUMENT: layout},
        )

    def is_ours(self, hook: Any) -> bool:
        """Whether a hook of a module is the plugin's own."""
        return getattr(hook, "__self__", None) in (self, self._adapters)

    def _prepare_slot_attention(self) -> Sequence[Pattern]:
        """Make the model use attention over slots, and return each layer's attention pattern."""
        if self._patterns is None:
            raise ValueError("packed forwards need the layers' attention patterns")
        if self._config._attn_implementation != SLOT_ATTENTION:  # the user has set another one
            self._model.set_attn_implementation(SLOT_ATTENTION)
        return self._patterns

    def uniform(
        self,
        chunks: Chunks,
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Run chunks of equal start and size, as :meth:`packed` does. All that the model must do is
        use the cache that it is given."""
        upload = Upload()
        self.pool.layout = UniformLayout(chunks, upload)
        ids, places = self._ids(tokens, len(chunks.segments), wanted, upload)
        start = self.pool.layout.past
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
        return self._forward(
            adapters,
            places,
            input_ids=ids,
            position_ids=positions,
            **{self._cache_name: self.pool},
        )

    def plain(
        self,
        contexts: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
        positions: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Run whole contexts without any state. They are padded on the right, to which a causal
        model does not attend.

        Args:
            contexts: Token ids.
            adapters: One per context.
            positions: The wanted positions of each context; ``None`` means the last one.

        Returns:
            ``[rows, vocab_size]`` logits, context by context in the order of ``positions``.
        """
        width = max(len(context) for context in contexts)
        tokens: list[int] = []
        wanted: list[int] = []
        for number, context in enumerate(contexts):
            last = [len(context) - 1] if positions is None else positions[number]
            wanted.extend(len(tokens) + at for at in last)
            tokens.extend(context)
            tokens.extend([0] * (width - len(context)))
        ids, places = self._ids(tokens, len(contexts), wanted, Upload())
        return self._forward(adapters, places, input_ids=ids, use_cache=False)

    def stateful(
        self,
        cache: Any,
        start: int,
        tokens: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
        empty: Sequence[int] = (),
    ) -> tuple[torch.Tensor, Any]:
        """Extend contexts by equally many tokens, with transformers' own cache.

        Args:
            cache: The cache that an earlier call returned, which is changed; ``None`` starts new
                contexts.
            start: How many positions of each context ``cache`` has.
            tokens: The next tokens of each context.
            adapters: One per context.
            wanted: Indices into all tokens, context by context.
            empty: How many of the first positions of each context are empty, if any.

        Returns:
            ``[len(wanted), vocab_size]`` logits, and the cache.

        Raises:
            ValueError: the model returns no cache.
        """
        flat, upload = [token for some in tokens for token in some], Upload()
        fronts = upload.add(empty) if any(empty) else None
        ids, places = self._ids(flat, len(tokens), wanted, upload)
        inputs = {"input_ids": ids, self._cache_name: cache}
        if start and self._takes_positions:
            # Positions are given, because a model such as Bamba may otherwise count from 0 after a
            # state too, or ask a cache that does not know them.
            all_positions = torch.arange(start + ids.shape[1], device=ids.device)
            positions = all_positions[start:].expand_as(ids)
            if fronts is not None:
                first = fronts.on(ids.device)[:, None]
                inputs["attention_mask"] = (all_positions >= first).long()
                positions = positions - first
            inputs["position_ids"] = positions
        logits, outputs = self._outputs(adapters, places, **inputs)
        cache = getattr(outputs, self._cache_name, None)
        if cache is None:
            raise ValueError("it returns no cache")
        return logits, cache

    def _ids(
        self, tokens: Sequence[int], count: int, wanted: Sequence[int], upload: Upload
    ) -> tuple[torch.Tensor, Indices]:
        """The tokens of ``count`` sequences of equal length, ``[count, tokens]`` on the device, and
        the indices of the wanted ones."""
        ids, places = upload.add(tokens), upload.add(wanted)
        return ids.on(self.device).view(count, -1), places

    def _forward(
        self, adapters: Sequence[Adapter | None], wanted: Indices | None, **inputs: Any
    ) -> torch.Tensor:
        """Run the model, and return the logits of the wanted positions; of all, if ``wanted`` is
        ``None``."""
        return self._outputs(adapters, wanted, **inputs)[0]

    def _outputs(
        self, adapters: Sequence[Adapter | None], wanted: Indices | None, **inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        inputs = {**self._asked, **inputs}
        if not self._takes_use_cache:
            inputs.pop("use_cache")
        self._wanted = None if wanted is None else wanted.on(self.device)
        self._selected = False
        width = inputs["input_ids"].shape[1]
        first = () if self._ids_by_name else (inputs.pop("input_ids"),)
        of_wanted = (at // width for at in (wanted.values if wanted else ()))
        try:
            with (
                self.without_gradients(),
                attention_kernels(self.device),
                self._evaluating(),
                self._adapters.applied(adapters, of_wanted, width),
            ):
                self._rope.forget()
                outputs = self._model(*first, **inputs)
        finally:
            self._wanted = None
        flat = _logits(outputs).flatten(0, 1)
        if wanted is not None and not self._selected:
            flat = flat.index_select(0, wanted.on(flat.device))
        return flat, outputs

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside the block, all modules are in evaluation mode, even if the user is training the
        model."""
        is_trained = any(map(attrgetter("training"), self.modules))
        trained = [each for each in self._model.modules() if each.training] if is_trained else []
        for module in trained:
            module.training = False
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    def _select(self, head: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._wanted is None:
            return None
        self._selected = True
        hidden = args[0].flatten(0, -2)
        return (hidden.index_select(0, self._wanted.to(hidden.device)).unsqueeze(1), *args[1:])


def served_model(model: Any) -> Any:
    """The model of transformers inside the wrappers of torch.compile and PEFT."""
    return next((one for one in model.modules() if isinstance(one, PreTrainedModel)), model)


def _logits(outputs: Any) -> torch.Tensor:
    """The logits in a forward's output, ``[batch, tokens, vocabulary]``: the field of that name, or
    the first tensor.

    Raises:
        ValueError: there is no tensor of this shape.
    """
    logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif logits is None:
        several = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        logits = next((each for each in several if isinstance(each, torch.Tensor)), None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        found = None if logits is None else list(logits.shape)
        raise ValueError(f"it gives logits of shape {found}")
    return logits
