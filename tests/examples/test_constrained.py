"""examples/constrained.py: its estimate is compared with an exact sum, and with unconstrained
samples."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics

import pytest
import structlog

from genlm.core import AsyncLM
from genlm.core.mock import ByteTokenizer, MockEngine

pytestmark = pytest.mark.any_version

pytest.importorskip("llguidance", reason="llguidance, which has wheels, is not installed here")
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def program(example):
    return example("constrained")


def language_of(program, lm, regex):
    return program.Language(lm, program.LLMatcher.grammar_from_regex(regex))


def exact(lm, accepted):
    """The probability of some texts, each followed by the stop token."""
    end = lm.tokenizer.eos_token_id
    return sum(
        math.exp(float(sum(lm.sequence_logprobs_sync(PROMPT, [*text, end])))) for text in accepted
    )


def test_the_mask_is_the_grammars(program, lm):
    language = language_of(program, lm, "ab?")
    end = lm.tokenizer.eos_token_id
    assert language.allowed(()).tolist() == [*b"a"]
    assert language.allowed((*b"a",)).tolist() == [*b"b", end]
    assert language.allowed((*b"ab",)).tolist() == [end]
    accepted = {text: language.accepts((*text,)) for text in (b"", b"a", b"ab", b"b", b"abb")}
    assert accepted == {b"": False, b"a": True, b"ab": True, b"b": False, b"abb": False}


class Begins(ByteTokenizer):
    """As many tokenizers: what is encoded begins with a special token, unless told not to."""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text, add_special_tokens)


def test_text_that_the_grammar_forces_begins_with_no_special_token(program):
    with AsyncLM(lambda: MockEngine(Begins()), backend="mock") as lm:
        language = language_of(program, lm, "ab?")
        assert lm.encode("a") == [256, *b"a"]
        assert language.allowed(()).tolist() == [*b"a"]
        assert language.allowed((*b"a",)).tolist() == [*b"b", 257]


def test_the_estimate_is_unbiased(program, lm):
    """Texts that do not end in time count with weight 0."""
    language = language_of(program, lm, "[ab]{1,2}|c{3}")
    expected = exact(lm, [b"a", b"b", b"aa", b"ab", b"ba", b"bb"])

    def estimate(seed):
        run = program.smc(lm, PROMPT, language, 20, 2, random.Random(seed))
        particles, log_constant = asyncio.run(run)
        ended = [p for p in particles if p.log_weight > -math.inf]
        assert all(language.accepts(p.token_ids) for p in ended)
        return math.exp(log_constant)

    found = [estimate(seed) for seed in range(60)]
    error = statistics.stdev(found) / math.sqrt(len(found))
    assert statistics.mean(found) == pytest.approx(expected, abs=4 * error)
    assert error < 0.2 * expected


def test_invalid_grammar_is_rejected(program, lm):
    with pytest.raises(SystemExit, match="llguidance does not take this grammar"):
        language_of(program, lm, "(")


SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
}


@pytest.fixture
def printed(monkeypatch, capsys, program, real_model):
    """The lines that the program prints on the real model."""
    pytest.importorskip("genlm.hf", reason="genlm-hf is not installed here")

    def run(*arguments):
        structlog.reset_defaults()  # otherwise it prints that a model is loaded
        monkeypatch.setattr("sys.argv", ["constrained", "--model", real_model, *arguments])
        program.main()
        return capsys.readouterr().out.splitlines()

    return run


def test_every_text_of_a_real_model_matches_the_schema(printed, tmp_path):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed here")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    *texts, last = printed(
        *("--schema", str(tmp_path / "schema.json"), "--particles", "4", "--max-tokens", "24"),
        *("--prompt", "Describe a person as JSON with name and age, and nothing else."),
    )
    assert texts
    for line in texts:
        jsonschema.validate(json.loads(line.split(maxsplit=1)[1]), SCHEMA)
    said = last.split(",")[0]
    assert said.startswith("log probability that the text is accepted ")
    assert -20 < float(said.split()[-1]) < 0


def test_estimate_on_a_real_model_matches_unconstrained_samples(printed):
    *_, weighted, counted = printed(
        *("--regex", "(Yes|No)[.,!]?", "--prompt", "Is the sky blue? Answer yes or no."),
        *("--particles", "32", "--max-tokens", "3", "--reject", "200"),
    )
    estimate = math.exp(float(weighted.split(",")[0].split()[-1]))
    share = math.exp(float(counted.split()[-1]))
    # Five standard errors of 200 samples, and as much for the particles.
    assert estimate == pytest.approx(share, abs=10 * math.sqrt(share * (1 - share) / 200))
