"""examples/harness.py beside the harness's own class for transformers, on made-up data."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed here")
pytest.importorskip("genlm.hf", reason="genlm-hf is not installed here")
MODEL = os.environ.get("GENLM_TEST_MODEL")
pytestmark = [
    pytest.mark.any_version,
    pytest.mark.skipif(not MODEL, reason="GENLM_TEST_MODEL names no real model"),
]

#: So short that a text needs several windows, and a prompt loses its beginning.
MAX_TOKENS = 24

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " the city of Rome"),
    ("The capital of France is ", "Paris"),
    ("", "Once upon a time"),
    ("one two three four five six seven eight nine ten " * 3, "eleven twelve"),
]
TEXTS = ["Short.", "The quick brown fox jumps over the lazy dog. " * 8]
ASKED = [
    ("The capital of France is", {"until": ["."], "max_gen_toks": 8}),
    ("1, 2, 3, 4,", {"until": [" 6", "\n"], "max_gen_toks": 12, "do_sample": False}),
]
QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "seven"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "a dog"], "answer": 0},
    {"question": "Fire is", "choices": ["cold", "hot"], "answer": 1},
]


@pytest.fixture(scope="module")
def ours(example):
    from genlm.core import load_model_by_name

    with load_model_by_name(MODEL, backend="hf") as lm:
        yield example("harness").GenlmLM(lm, max_length=MAX_TOKENS)


@pytest.fixture(scope="module")
def theirs():
    from lm_eval.models.huggingface import HFLM

    return HFLM(MODEL, device="cpu", dtype="float32", max_length=MAX_TOKENS, batch_size=1)


def asked(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def test_continuations_have_the_same_likelihood_and_are_greedy_or_not(ours, theirs):
    found, expected = ours.loglikelihood(asked(*PAIRS)), theirs.loglikelihood(asked(*PAIRS))
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert {is_greedy for _, is_greedy in found} == {True, False}
    for (logprob, _), (same, _) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(same, abs=1e-3)


def test_texts_longer_than_the_context_are_scored_in_windows(ours, theirs):
    requests = asked(*((text,) for text in TEXTS))
    found, expected = ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert found == pytest.approx(expected, abs=1e-2)


def test_generation_up_to_stop_strings_equals_the_harness(ours, theirs):
    assert ours.generate_until(asked(*ASKED)) == theirs.generate_until(asked(*ASKED))


@pytest.fixture(scope="module")
def begun():
    """A small model whose tokenizer begins every text with a token, as Gemma's and Llama's do."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.3}
    ends = {"bos_token_id": 256, "eos_token_id": 257}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **shape, **heads, **ends)).eval()
    return model, tokenizer


@pytest.fixture(scope="module")
def begins(example, begun):
    from genlm.hf import AsyncTransformer

    with AsyncTransformer(*begun) as lm:
        yield example("harness").GenlmLM(lm, max_length=MAX_TOKENS)


def test_a_context_begins_as_the_tokenizer_begins_texts_and_once(begins, begun):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = begun
    theirs = HFLM(model, tokenizer=tokenizer, device="cpu", max_length=MAX_TOKENS, batch_size=1)
    pairs = [("France", " Paris"), ("<bos>France", " Paris"), ("", "Paris"), ("France ", "is")]
    found, expected = begins.loglikelihood(asked(*pairs)), theirs.loglikelihood(asked(*pairs))
    assert [logprob for logprob, _ in found] == pytest.approx([e for e, _ in expected], abs=1e-3)
    assert found[0] == found[1]
    drawn = asked(("France", {"until": ["."], "max_gen_toks": 8}))
    assert begins.generate_until(drawn) == theirs.generate_until(drawn)


def test_windows_of_a_long_text_begin_with_the_tokenizers_first_token(begins):
    """This concerns each window, and a prompt that loses its beginning."""
    lm, text = begins.lm, "The quick brown fox jumps over it."
    ids = lm.encode(text, add_special_tokens=False)

    def score(context, rest):
        return float(lm.sequence_logprobs_sync(context, rest).sum())

    (found,) = begins.loglikelihood_rolling(asked((text,)))
    first, second = ids[:MAX_TOKENS], ids[MAX_TOKENS:]
    room = MAX_TOKENS + 1 - len(second) - 1  # besides the token with which the context begins
    expected = score([256], first) + score([256, *first[len(first) - room :]], second)
    assert found == pytest.approx(expected, abs=1e-3)
    ((found, _),) = begins.loglikelihood(asked((text, " And")))
    rest = lm.encode(" And", add_special_tokens=False)
    assert found == pytest.approx(score([256, *ids[-(MAX_TOKENS - len(rest)) :]], rest), abs=1e-3)


def test_harness_gives_the_same_results_for_two_tasks(ours, theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "data.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "num_fewshot": 0,
    }
    choice = {
        "task": "made_up_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    perplexity = {
        "task": "made_up_perplexity",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[answer]}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    }

    # With its default tasks, it would read 14 000 files.
    no_others = lm_eval.tasks.TaskManager(include_defaults=False)

    def results(model):
        tasks = [choice | shared, perplexity | shared]
        return lm_eval.simple_evaluate(
            model, tasks=tasks, task_manager=no_others, bootstrap_iters=0
        )["results"]

    found, expected = results(ours), results(theirs)
    assert set(found) == {"made_up_choice", "made_up_perplexity"}
    for task, metrics in expected.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found[task][name] == pytest.approx(value, rel=1e-3)
