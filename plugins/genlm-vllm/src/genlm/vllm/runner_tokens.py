"""How known tokens are given to vLLM's model runners.

A session is extended by tokens that the caller knows, whereas vLLM expects tokens that it has drawn
itself. Both the scheduler and the model runner must get them; this module gives them to the runner.
The runner V1 keeps tokens in arrays of its process, the runner V2 on the device. If runners are in
worker processes, what a step appends is sent to all of them in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from genlm.vllm.forks import absent_names

V1_NAMES = (
    "requests", "input_batch.req_id_to_index", "input_batch.token_ids_cpu",
    "input_batch.is_token_ids", "input_batch.num_tokens_no_spec",
)  # fmt: skip
V2_NAMES = (
    "device", "model_state", "req_states.req_id_to_index", "req_states.all_token_ids.gpu",
    "req_states.total_len.gpu", "req_states.prefill_len.np", "req_states.prefill_len.gpu",
    "req_states.last_sampled_tokens",
)  # fmt: skip
#: The further attributes that the runner V2 must have if positions have several axes (M-RoPE).
ROPE_NAMES = ("num_dims", "prefill_positions.gpu", "prefill_delta.np")


class RunnerTokens(Protocol):
    """The tokens of requests, as one model runner keeps them.

    Attributes:
        in_order: Whether the runner may have begun a step, and not ended it, when tokens are
            written: that step reads what was there before.
    """

    in_order: bool

    def append(self, request: Any, start: int, token_ids: list[int]) -> None:
        """Let ``token_ids`` be the tokens of ``request`` (the scheduler's object, which has them
        already) from position ``start`` on. The runner may have none of them before
        :meth:`write`."""

    def write(self) -> None:
        """Write all appended tokens into the runner. Called before each step, on vLLM's stream."""


class V1Tokens:
    """The arrays of the model runner V1.

    The arrays have only the requests of the runner's last step. When the runner takes up another
    request, also one that it preempted, it reads the tokens from the request's list.
    """

    in_order = False

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def append(self, request: Any, start: int, token_ids: list[int]) -> None:
        request_id, drawn = request.request_id, request.num_output_tokens - len(token_ids)
        self._runner.requests[request_id].output_token_ids[drawn:] = token_ids
        batch, end = self._runner.input_batch, start + len(token_ids)
        slot = batch.req_id_to_index.get(request_id)
        if slot is not None:
            batch.token_ids_cpu[slot, start:end] = token_ids
            batch.is_token_ids[slot, start:end] = True
            batch.num_tokens_no_spec[slot] = end

    def write(self) -> None:
        """Do nothing: :meth:`append` has written them already."""


class V2Tokens:
    """The buffers of the model runner V2, by a request's slot.

    A request has a slot from its first step until it ends or is preempted. vLLM adds a preempted
    request again with all tokens of the scheduler's object. A decoding step takes its input from
    the tokens that the last step drew, so a single known token is written there. In the list of all
    tokens the drawn token stays, because computed tokens are not read from there again. Several
    known tokens become a prompt whose beginning is already computed.

    All is written by the device, on vLLM's stream, in place: vLLM's own staged writes take turns in
    as many buffers of the host as steps may be under way, and a second turn in one step would write
    into one that is still read.
    """

    in_order = True

    def __init__(self, runner: Any) -> None:
        from vllm.utils.torch_utils import async_tensor_h2d

        self._states, self._device = runner.req_states, runner.device
        self._to_device = async_tensor_h2d
        self._rope = getattr(runner.model_state, "rope_state", None)
        self._next: dict[int, int] = {}  # the input of the next decoding step, by slot
        # Prompts that have grown: slots, where the new tokens begin, and the tokens.
        self._grown: list[tuple[int, int, list[int]]] = []

    def append(self, request: Any, start: int, token_ids: list[int]) -> None:
        slot = self._states.req_id_to_index.get(request.request_id)
        if slot is None:
            return
        # Only a slot whose tokens are all computed makes a decoding step. If vLLM has preempted the
        # session and computes it again as a prompt, the new token belongs to that prompt.
        if len(token_ids) == 1 and request.num_computed_tokens == start:
            self._next[slot] = token_ids[0]
        else:
            self._grown.append((slot, start, token_ids))

    def write(self) -> None:
        with torch.inference_mode():
            if self._grown:
                self._write_prompts()
                self._grown.clear()
            if self._next:
                slots, token_ids = self._on_device([*self._next], [*self._next.values()])
                self._states.last_sampled_tokens[:, 0].index_copy_(0, slots, token_ids)
                self._next.clear()

    def _write_prompts(self) -> None:
        states, grown = self._states, self._grown
        ends = [start + len(token_ids) for _, start, token_ids in grown]
        of_prompts = [slot for slot, *_ in grown]
        states.prefill_len.np[of_prompts] = ends
        slots, lengths = self._on_device(of_prompts, ends)
        for kept in (states.prefill_len.gpu, states.total_len.gpu):
            kept.index_copy_(0, slots, lengths.to(kept.dtype))
        rows, places, token_ids = self._on_device(
            [slot for slot, _, some in grown for _ in some],
            [start + at for _, start, some in grown for at in range(len(some))],
            [token_id for *_, some in grown for token_id in some],
        )
        _put(states.all_token_ids.gpu, rows, places, token_ids)
        if self._rope is not None:
            (behind,) = self._on_device(
                [int(self._rope.prefill_delta.np[slot]) for slot, _, some in grown for _ in some]
            )
            for axis in range(axes := self._rope.num_dims):
                positions = self._rope.prefill_positions.gpu
                _put(positions, rows * axes + axis, places, places + behind)

    def _on_device(self, *columns: list[int]) -> torch.Tensor:
        return self._to_device(columns, self._device, torch.int64)  # type: ignore[no-any-return]


class Extended(NamedTuple):
    """What a model runner in a worker process must know of a request of the scheduler."""

    request_id: str
    num_output_tokens: int
    num_computed_tokens: int


#: A request that is extended, where its new tokens begin, and the tokens.
Appended = tuple[Extended, int, list[int]]


class WorkerTokens:
    """The tokens of the model runners in worker processes, each of which has all requests.

    Args:
        send: Calls a method of all workers, and waits until they have run it.
    """

    in_order = False

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send
        self._appended: list[Appended] = []

    def append(self, request: Any, start: int, token_ids: list[int]) -> None:
        known = Extended(request.request_id, request.num_output_tokens, request.num_computed_tokens)
        self._appended.append((known, start, token_ids))

    def write(self) -> None:
        if self._appended:
            appended, self._appended = self._appended, []
            self._send("genlm_append_tokens", appended)


def _put(
    kept: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
) -> None:
    kept.index_put_((rows, columns), values.to(kept.dtype))


def runner_tokens(runner: Any) -> RunnerTokens | str:
    """The tokens of a model runner; or, if it lacks a needed attribute, a message that says so."""
    if not hasattr(runner, "req_states"):
        missing = absent_names(runner, *V1_NAMES)
        return f"this model runner has no {', '.join(missing)}" if missing else V1Tokens(runner)
    from vllm.utils import torch_utils

    missing = absent_names(runner, *V2_NAMES) + absent_names(torch_utils, "async_tensor_h2d")
    if (rope := getattr(getattr(runner, "model_state", None), "rope_state", None)) is not None:
        missing += absent_names(rope, *ROPE_NAMES)
    return f"this model runner has no {', '.join(missing)}" if missing else V2Tokens(runner)
