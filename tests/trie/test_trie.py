"""Sums, maxima and shape of the trie, against their definition."""

from __future__ import annotations

import asyncio
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm.core import InvalidInputError, InvalidOptionError, VocabularyError
from genlm.core.tokenization import Token
from genlm.core.trie import (
    AsyncTokenCharacterTrie,
    ParallelTokenCharacterTrie,
    TokenCharacterTrie,
)
from genlm.core.trie.bags import BagKernel
from genlm.core.trie.device import DeviceKernel
from genlm.core.trie.weights import SUM
from tools.launched import Launched

from ..conftest import run_python

#: The device on which the kernel of accelerators is tested.
DEVICE = os.environ.get("GENLM_TEST_DEVICE", "cpu:0")


class EndOfSequence:
    """An item that is its own only symbol."""

    def __iter__(self):
        return iter([self])

    def __repr__(self):
        return "EOS"


class OnTorch(TokenCharacterTrie):
    """The trie as it computes on accelerators, by default on the CPU; in float64 for exact
    answers."""

    def __init__(self, decode):
        super().__init__(decode, device=DEVICE)

    def weight_sum(self, ws):
        return super().weight_sum(ws, np.float64)

    def weight_max(self, ws):
        return super().weight_max(ws, np.float64)

    def batch_weight_sum(self, ws, dtype=np.float64):
        return super().batch_weight_sum(ws, dtype)

    def batch_weight_max(self, ws):
        return super().batch_weight_max(ws, np.float64)


class InBags(OnTorch):
    """The alternative kernel for accelerators."""

    _device_kernel = BagKernel


EOS = EndOfSequence()
# Few symbols, long shared prefixes.
WORDS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(bytes), min_size=1, max_size=40)
TOKENS = WORDS.map(Token.vocabulary)
STRINGS = st.lists(st.text("ab", max_size=3), unique=True)
TUPLES = st.lists(
    st.tuples(st.sampled_from([0, 1, "a", None]), st.sampled_from([0, "b"])), unique=True
)
MIXED = st.tuples(TOKENS, STRINGS, TUPLES).map(lambda kinds: [*kinds[0], *kinds[1], *kinds[2], EOS])
WEIGHTS = st.floats(-1e6, 1e6) | st.just(-math.inf)

tries = pytest.mark.parametrize("trie_class", [TokenCharacterTrie, OnTorch, InBags])
#: The kernels of an accelerator, each in its own precision.
on_a_device = pytest.mark.parametrize("kernel", [DeviceKernel, BagKernel])


def by_definition(trie, ws, combine):
    """For each node, the result of ``combine`` for the weights of the items that begin with its
    letters, or of its item."""
    expected = np.empty(len(trie))
    for node in range(len(trie)):
        prefix = trie.node2prefix[node]
        below = [
            weight
            for item, weight in zip(trie.decode, ws, strict=True)
            if list(item)[: len(prefix)] == prefix
        ]
        expected[node] = combine(below)
    for position, leaf in enumerate(trie.word2leaf.values()):
        expected[leaf] = ws[position]
    return expected


@tries
@given(items=MIXED, data=st.data())
def test_sums_and_maxima_match_the_definition(trie_class, items, data):
    trie = trie_class(items)
    ws = np.array(data.draw(st.lists(WEIGHTS, min_size=len(items), max_size=len(items))))
    assert np.array_equal(trie.weight_max(ws), by_definition(trie, ws, max))
    if ws.max() <= 0:  # otherwise they are rejected as log-probabilities
        ws = -ws
        ws[np.isposinf(ws)] = 0.0
    # The rounding error of a sum is relative to the added numbers, and not to the result.
    scale = np.abs(ws[np.isfinite(ws)]).sum()
    np.testing.assert_allclose(
        trie.weight_sum(ws), by_definition(trie, ws, math.fsum), rtol=0, atol=1e-15 * scale
    )


@tries
@given(
    seed=st.integers(0, 2**32 - 1),
    symbols=st.sampled_from([1, 2, 4, 50]),
    longest=st.sampled_from([2, 9, 40]),
)
@settings(max_examples=20)
def test_sums_and_maxima_over_many_items(trie_class, seed, symbols, longest):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, longest, generator.integers(1, 1500))
    trie = trie_class(
        Token.vocabulary([generator.integers(0, symbols, n, np.uint8).tobytes() for n in lengths])
    )
    ws = generator.normal(size=len(lengths))
    ws[0] = abs(ws[0])  # if none is positive, they are rejected
    below = [ws[trie.positions_under(node)] for node in range(len(trie))]
    np.testing.assert_allclose(
        trie.weight_sum(ws), [*map(math.fsum, below)], rtol=0, atol=1e-14 * len(lengths)
    )
    assert np.array_equal(trie.weight_max(ws), [*map(max, below)])


@given(items=MIXED)
def test_shape_of_a_trie_is_right(items):
    trie = TokenCharacterTrie(items)
    seen = [trie.root]
    for node in seen:
        for edge, child in trie.children[node].items():
            leaf = child in trie.leaf2word
            assert trie.node2prefix[child] == trie.node2prefix[node] + ([] if leaf else [edge])
            assert not leaf or (edge[0] is None and trie.children[child] == {})
            seen.append(child)
    assert sorted(seen) == list(range(len(trie))) == list(range(len(trie.children)))
    assert len(trie.leaf2word) == len(items)
    assert trie.idx_to_leaf.tolist() == [[*pair] for pair in enumerate(trie.word2leaf.values())]
    for position, (item, (word, leaf)) in enumerate(
        zip(items, trie.word2leaf.items(), strict=True)
    ):
        assert word == ((bytes(item), item.token_id) if isinstance(item, Token) else item)
        assert trie.leaf2word[leaf] == word
        assert trie.node2prefix[leaf] == list(item)
        node = trie.find(item)
        assert trie.children[node][None, position] == leaf
    prefixes = [
        tuple(prefix) for node, prefix in trie.node2prefix.items() if node not in trie.leaf2word
    ]
    assert len(set(prefixes)) == len(prefixes)


def test_nothing_is_compiled_and_no_engine_imported():
    """So the first call of a process is as fast as any."""
    result = run_python("""
        import sys
        import genlm.core.tokenization
        from genlm.core.trie import TokenCharacterTrie
        trie = TokenCharacterTrie([b"a", b"ab"])
        trie.weight_sum([0.5, 0.5])
        trie.batch_weight_max([[0.5, 0.5]])
        print({"llvmlite", "numba", "tokenizers", "torch"} & {*sys.modules})
    """)
    assert result.stdout.split() == ["set()"]


def test_small_masses_survive_beside_large_ones():
    words = [bytes([first, second]) for first in range(50) for second in range(50)]
    trie = TokenCharacterTrie(words)
    ws = np.array([1.0 if word[0] % 2 else 1e-30 for word in words])
    sums = trie.weight_sum(ws)
    for first in range(50):
        assert sums[trie.find([first])] == pytest.approx(50.0 if first % 2 else 50e-30, rel=1e-15)


@tries
def test_batch_result_equals_single_results(trie_class, vocabulary, weights):
    trie = trie_class(vocabulary)
    for batch, single in (
        (trie.batch_weight_sum, trie.weight_sum),
        (trie.batch_weight_max, trie.weight_max),
    ):
        expected = np.stack([single(row) for row in weights])
        assert np.array_equal(batch(weights), expected)
        assert np.array_equal(batch(list(weights)), expected)
        assert np.array_equal(batch([torch.from_numpy(row) for row in weights]), expected)
        assert np.array_equal(batch(torch.from_numpy(weights)), expected)
        assert np.array_equal(batch(weights[::-1]), expected[::-1])


@pytest.fixture(scope="module")
def large():
    """A trie of which a batch is worth several threads, and weights for that."""
    words = [number.to_bytes(3, "big") for number in range(0, 1 << 24, 411)]
    return TokenCharacterTrie(words), np.random.default_rng(0).random((8, len(words)))


def test_threaded_batch_result_equals_single_results(large):
    trie, ws = large
    assert np.array_equal(trie.batch_weight_sum(ws), np.stack([trie.weight_sum(row) for row in ws]))


def test_threaded_batch_is_computed_during_interpreter_exit():
    """No further thread starts then."""
    result = run_python("""
        import threading
        import numpy as np
        from genlm.core.trie import TokenCharacterTrie
        from genlm.core.trie.cpu import CpuKernel
        CpuKernel._cores = 2
        words = [number.to_bytes(3, "big") for number in range(0, 1 << 24, 411)]
        trie, ws = TokenCharacterTrie(words), np.ones((8, len(words)))
        def work():
            threading.main_thread().join()
            print(trie.batch_weight_sum(ws)[:, 0].sum() == ws.size)
        threading.Thread(target=work).start()
    """)
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_large_results_are_never_written_to_while_anything_refers_to_them(large):
    trie, ws = large
    expected = trie.batch_weight_sum(ws).copy()
    row = trie.batch_weight_sum(ws)[3]
    tensor = trie.batch_weight_sum(ws, dtype=torch.float64)[4]
    part = memoryview(trie.batch_weight_sum(ws)[5, ::2])
    whole = trie.batch_weight_sum(ws)
    for _ in range(3):
        trie.batch_weight_max(-ws)
    assert np.array_equal(row, expected[3])
    assert np.array_equal(tensor.numpy(), expected[4])
    assert np.array_equal(np.asarray(part), expected[5, ::2])
    assert np.array_equal(whole, expected)
    twice = np.concatenate([ws, ws])  # larger than any block of memory that has been released
    assert np.array_equal(trie.batch_weight_sum(twice), np.concatenate([expected, expected]))


@tries
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_of_any_precision_have_the_same_sums(trie_class, vocabulary, weights, dtype):
    trie = trie_class(vocabulary)
    ws = torch.from_numpy(weights[0]).to(dtype).requires_grad_()
    expected = trie.weight_sum(ws.detach().double().numpy())
    assert np.array_equal(trie.weight_sum(ws), expected)
    if dtype != torch.bfloat16:
        assert np.array_equal(trie.weight_sum(ws.detach().numpy()), expected)


@tries
@pytest.mark.parametrize("dtype", [">f8", np.longdouble])
def test_weights_that_pytorch_cannot_read(trie_class, vocabulary, weights, dtype):
    trie = trie_class(vocabulary)
    assert np.array_equal(trie.weight_sum(weights[0].astype(dtype)), trie.weight_sum(weights[0]))


@tries
def test_results_have_the_requested_dtype_and_kind(trie_class, vocabulary, weights):
    trie = trie_class(vocabulary)
    exact = trie.batch_weight_sum(weights)
    assert isinstance(exact, np.ndarray)
    assert exact.dtype == np.float64
    for dtype in (np.float32, "float32"):
        single = trie.batch_weight_sum(weights, dtype=dtype)
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, exact, rtol=2e-6, atol=1e-37)
    for dtype, error in ((torch.float32, 2e-6), (torch.float64, 0)):
        tensor = trie.batch_weight_sum(weights, dtype=dtype)
        assert tensor.dtype == dtype
        np.testing.assert_allclose(tensor, exact, rtol=error, atol=1e-37)


@tries
def test_results_belong_to_the_caller(trie_class, vocabulary, weights):
    trie = trie_class(vocabulary)
    given_weights = weights.copy()
    first = trie.weight_sum(given_weights[0])
    expected = first.copy()
    trie.weight_max(given_weights[1])[:] = 7.0
    assert np.array_equal(first, expected)
    first[:] = 0.0
    assert np.array_equal(trie.weight_sum(given_weights[0]), expected)
    assert np.array_equal(given_weights, weights)


@tries
def test_a_batch_may_be_empty(trie_class):
    trie = trie_class([b"a", b"b"])
    for none in ([], np.zeros((0, 2)), torch.zeros((0, 2))):
        assert trie.batch_weight_sum(none).shape == (0, len(trie))


@tries
def test_log_probabilities_are_no_weights_of_a_sum(trie_class, vocabulary, weights):
    """Maxima take them, and so do masses; a sum of them is no number that anybody wants."""
    trie = trie_class(vocabulary)
    with np.errstate(divide="ignore"):
        logs = np.log(weights * (weights > 1e-6))
    for ask in (
        lambda: trie.weight_sum(logs[0]),
        lambda: trie.weight_sum(torch.from_numpy(logs[0]).float()),
        lambda: trie.batch_weight_sum(np.stack([weights[0], logs[0]])),
        lambda: trie.children_sum(trie.root, logs[0]),
        lambda: trie.heaviest_children(trie.root, logs[0], 3),
    ):
        with pytest.raises(InvalidInputError, match=r"look like log-prob.* give row\.exp\(\)"):
            ask()
    assert trie.weight_max(logs[0])[trie.root] == pytest.approx(logs[0].max())
    assert trie.children_max(trie.root, logs[0])
    assert not trie.weight_sum(np.zeros(len(vocabulary))).any()


def test_a_call_with_log_probabilities_fails_alone(vocabulary, weights):
    trie = AsyncTokenCharacterTrie(TokenCharacterTrie(vocabulary))

    async def ask():
        given = (weights[0], np.log(weights[1] + 1e-30), weights[2])
        return await asyncio.gather(*map(trie.weight_sum, given), return_exceptions=True)

    first, refused, last = asyncio.run(ask())
    trie.shutdown()
    assert isinstance(refused, InvalidInputError)
    assert np.array_equal(first, trie.trie.weight_sum(weights[0]))
    assert np.array_equal(last, trie.trie.weight_sum(weights[2]))


@tries
@pytest.mark.parametrize("ws", [np.zeros(3), np.zeros((2, 3)), np.zeros(()), [0.5]])
def test_weights_of_another_shape_are_rejected(trie_class, ws):
    trie = trie_class([b"a", b"b"])
    with pytest.raises(InvalidInputError, match=r"the trie needs \[2\]"):
        trie.weight_sum(ws)
    with pytest.raises(InvalidInputError):
        trie.batch_weight_max([ws, np.zeros(2)])


@pytest.mark.parametrize("dtype", [np.int32, torch.float16, "complex128", "double precision"])
def test_a_result_of_another_precision_is_rejected(dtype):
    with pytest.raises(InvalidOptionError, match="float64 or float32"):
        TokenCharacterTrie([b"a"]).weight_sum([1.0], dtype=dtype)


def test_a_vocabulary_that_makes_no_trie_is_rejected():
    with pytest.raises(VocabularyError, match="at least one item"):
        TokenCharacterTrie([])
    with pytest.raises(
        ValueError, match=r"Duplicate word in vocabulary: b'ab' is at positions 0 and 3"
    ):
        TokenCharacterTrie([b"ab", Token(0, b"ab"), Token(1, b"ab"), b"ab"])
    with pytest.raises(VocabularyError, match="positions 0 and 1"):
        TokenCharacterTrie([Token(3, b"x"), Token(3, b"x")])


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([b"a", 7], "'int' object is not iterable"),
        ([Token(0, b"a"), object()], "'object' object is not iterable"),
        ([b"a", bytearray(b"b")], "unhashable type: 'bytearray'"),
        ([(1, [2])], "unhashable type: 'list'"),
    ],
)
def test_an_item_that_is_not_a_sequence_of_symbols_is_rejected(items, reason):
    with pytest.raises(TypeError, match=reason) as refusal:
        TokenCharacterTrie(items)
    assert isinstance(refusal.value, VocabularyError)
    assert "hashable iterables of hashable symbols" in str(refusal.value)


def test_the_vocabulary_may_be_any_iterable_and_is_the_tries_own():
    words = [b"a", b"ab"]
    trie = TokenCharacterTrie(words)
    words.append(b"b")
    assert trie.decode == TokenCharacterTrie(iter([b"a", b"ab"])).decode == [b"a", b"ab"]


@pytest.mark.parametrize("device", ["abacus", "", 0])
@pytest.mark.parametrize("kind", [TokenCharacterTrie, ParallelTokenCharacterTrie])
def test_an_unknown_device_is_rejected(kind, device):
    with pytest.raises(InvalidOptionError, match=f"device is '{device}'"):
        kind([b"a"], device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_device_is_rejected():
    with pytest.raises(InvalidOptionError, match="'cuda', which this PyTorch cannot use here"):
        ParallelTokenCharacterTrie([b"a"], device="cuda")


def test_the_parallel_trie_is_the_same_trie(vocabulary, weights):
    parallel = ParallelTokenCharacterTrie(vocabulary)
    assert isinstance(parallel, TokenCharacterTrie)
    sums = TokenCharacterTrie(vocabulary).batch_weight_sum(weights)
    np.testing.assert_allclose(
        parallel.batch_weight_sum(weights), sums, rtol=1e-14 if parallel.device == "cpu" else 2e-6
    )


# --- on a device ----------------------------------------------------------------------------------


def made(kernel, vocabulary, device=None):
    """A trie that computes with a kernel."""
    kind = type("Trie", (TokenCharacterTrie,), {"_device_kernel": kernel})
    return kind(vocabulary, device=device or DEVICE)


@on_a_device
def test_a_device_computes_in_float32_with_a_small_relative_error(kernel, vocabulary, weights):
    exact, trie = TokenCharacterTrie(vocabulary), made(kernel, vocabulary)
    sums = trie.batch_weight_sum(weights)
    assert sums.dtype == np.float32
    np.testing.assert_allclose(sums, exact.batch_weight_sum(weights), rtol=2e-6, atol=1e-37)
    logs = np.log(weights)
    maxima = exact.batch_weight_max(logs)
    np.testing.assert_allclose(trie.batch_weight_max(logs), maxima, rtol=6e-8)


@on_a_device
def test_the_error_in_float32_stays_small_for_a_large_vocabulary(kernel):
    """With 100,000 items below one node, the errors of sequential sums would add up."""
    words = [number.to_bytes(3, "big") for number in range(0, 1 << 24, 167)]
    ws = np.random.default_rng(0).lognormal(sigma=4.0, size=(4, len(words)))
    exact = TokenCharacterTrie(words).batch_weight_sum(ws)
    sums = made(kernel, words).batch_weight_sum(ws)
    np.testing.assert_allclose(sums, exact, rtol=2e-6)


def test_bags_take_few_launches_for_any_number_of_rows_and_items(vocabulary, weights):
    """A launch costs more than most of its computation, which is the reason for bags."""
    words = [number.to_bytes(3, "big") for number in range(0, 1 << 24, 167)]  # a level more
    for items, ws in ((vocabulary, weights), (words, np.ones((64, len(words))))):
        kernel, rows = made(BagKernel, items)._kernel, torch.from_numpy(ws).float()
        counts = []
        for some in (rows[:1], rows):
            with Launched() as launched:
                kernel.combine(SUM, some.to(DEVICE))
            counts.append(launched.count)
        assert counts[0] == counts[1] <= 10


@on_a_device
def test_tensors_are_given_back_without_waiting_for_the_device(kernel, vocabulary):
    """Tensors on the device "meta" have no values: reading any, and so waiting for it, raises."""
    trie = made(kernel, vocabulary, device="meta")
    ws = torch.empty(4, len(vocabulary), device="meta")
    for reduce in (trie.batch_weight_sum, trie.batch_weight_max):
        for rows in (ws, list(ws), ws.half()):
            sums = reduce(rows, dtype=torch.float32)
            assert (sums.shape, sums.device.type) == ((4, len(trie)), "meta")
    assert trie.weight_sum(ws[0], dtype=torch.float32).shape == (len(trie),)
    with pytest.raises(NotImplementedError):
        trie.batch_weight_sum(ws)  # an array needs the values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@on_a_device
def test_sums_on_cuda_do_not_wait_for_the_device(kernel, vocabulary, weights):
    trie = made(kernel, vocabulary, device="cuda")
    ws = torch.from_numpy(weights).float().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = trie.batch_weight_sum(ws, dtype=torch.float32)
        maxima = trie.batch_weight_max(ws, dtype=torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = TokenCharacterTrie(vocabulary)
    np.testing.assert_allclose(sums.cpu(), on_cpu.batch_weight_sum(weights), rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(
        maxima.cpu(), on_cpu.batch_weight_max(weights), rtol=1e-6, atol=1e-37
    )
