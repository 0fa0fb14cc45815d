"""Discovery: real distributions on the path, found through their entry points."""

from __future__ import annotations

import gc
import weakref

import pytest
import structlog
import torch

from genlm.core import (
    AsyncLM,
    BackendImportError,
    BackendInfo,
    BackendNotFoundError,
    BackendUnavailableError,
    InvalidInputError,
    ModelClosedError,
    PluginError,
    VocabularyError,
    hookimpl,
    load_model_by_name,
    plugins,
)
from genlm.core.cli import main
from genlm.core.plugins import backend_names, choose_backend, find_backend

from .conftest import run_python
from .doubles import Plain


class Mine(AsyncLM):
    """A backend's own class, as a plugin writes it."""

    @classmethod
    def from_name(cls, model_name, **options):
        return cls.from_backend("mine", model_name, options)


def test_a_third_partys_backend_is_found_and_loaded(install):
    install("mine")
    assert "mine" in backend_names()
    assert find_backend("mine").distribution == "mine 1.2"
    options = {"delay": 0, "batch_size": 3}
    with load_model_by_name("any", backend="mine", llm_opts=options) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (258,)
    with Mine.from_name("any", **options) as lm:
        assert isinstance(lm, Mine)
        assert lm.next_token_logprobs_sync([1]).shape == (258,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("any", "mokc"), r"no backend 'mokc'; installed: .*mock.*; did you mean 'mock'\?$"),
        (("any", "MOCK"), r"did you mean 'mock'\?$"),
        (("mock", "org/model"), r"the model comes first: .*\('org/model', ba"),
        (("any", "xyzzy"), r"no backend 'xyzzy'; installed: [\w, ]*mock[\w, ]*$"),
        (("any", 5), "the backend must be named by a string, one of those .*mock.*; got 5"),
        # By the name of their engine:
        (("any", "transformers"), "did you mean 'hf'"),
        (("any", "Huggingface"), "did you mean 'hf'"),
        (("any", "mlx_lm"), "did you mean 'mlx'"),
        (("any", "SGLang"), r"did you mean 'sgl'\?$"),
    ],
)
def test_unknown_backend_is_rejected(install, arguments, said):
    install("sgl")
    with pytest.raises(BackendNotFoundError, match=said):
        load_model_by_name(*arguments)


def test_a_known_plugin_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(plugins, "KNOWN", {"vllm-test": "genlm-vllm-test"})
    with pytest.raises(BackendNotFoundError, match="pip install genlm-vllm-test"):
        find_backend("vllm-test")
    with pytest.raises(
        BackendNotFoundError, match=r"did you mean 'vllm-test'\?; pip install genlm-vllm-test"
    ):
        find_backend("vllm-tst")


def test_a_plugin_that_fails_to_import_is_not_called_missing(install):
    install("broken", "import a_cuda_library_of_another_version")
    with pytest.raises(
        BackendImportError,
        match=r"'broken' is installed \(broken 1\.2\), but importing plugin_broken failed",
    ) as e:
        find_backend("broken")
    assert isinstance(e.value.__cause__, ModuleNotFoundError)


INFO = """
from genlm.core import BackendInfo, hookimpl

@hookimpl
def genlm_backend_info():
    {body}
"""


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (
            None,
            "plugin-bad.plugin",
            "no: backend 'bad' is installed (bad 1.2), but importing plugin-bad.plugin failed",
        ),
        (
            "import sys; sys.exit('needs Linux')",
            None,
            "importing plugin_bad failed: SystemExit: needs Linux; repair",
        ),
        ("raise RuntimeError('CUDA mismatch')", None, "RuntimeError: CUDA mismatch"),
        (
            INFO.format(body="raise RuntimeError('no driver')"),
            None,
            "genlm_backend_info raised RuntimeError: no driver",
        ),
        (INFO.format(body="return 'ready'"), None, "genlm_backend_info returned 'ready'"),
        (INFO.format(body="return BackendInfo('nameless', engine='')"), None, "yes"),
    ],
)
def test_faulty_plugin_is_reported_without_affecting_others(
    install, monkeypatch, capsys, source, target, said
):
    install("bad", source, target=target)
    install("mine")
    assert main(["backends"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said in lines["bad"]
    assert lines["mine"].endswith("yes")
    monkeypatch.setattr(plugins, "backend_names", lambda: ["bad", "mine"])
    assert choose_backend() == "mine"


def test_entry_points_with_one_name_are_all_listed(install):
    """Two distributions, and two entry points of one of them."""
    install("mine", distribution="first")
    install("mine", distribution="second", target="plugin_mine\nmine = another_module")
    with pytest.raises(
        BackendImportError,
        match=r"once: another_module of second 1\.2, plugin_mine of first 1\.2, plugin_mine of "
        r"second 1\.2; keep only one",
    ):
        find_backend("mine")


@pytest.mark.parametrize(
    ("needs", "install", "said"),
    [
        (["json", "no_such"], None, "no_such not installed; pip install no_such"),
        (["no_such"], "ask somebody", "no_such not installed; ask somebody"),
        (["json"], None, None),
    ],
)
def test_a_backend_that_needs_what_is_missing_says_so(needs, install, said):
    assert BackendInfo("", engine="any", needs=needs, install=install).unavailable == said


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (">=1.1,<1.3", None),
        (None, None),
        (
            ">=1.3,<2",
            "mine 1.2 is installed, and this version of the plugin is for mine>=1.3,<2; pip "
            "install 'mine>=1.3,<2', or take another version of the plugin",
        ),
    ],
)
def test_a_backend_for_other_versions_of_its_engine_says_so(install, versions, said):
    install("mine")
    assert BackendInfo("", engine="mine", versions=versions).unavailable == said
    assert BackendInfo("", engine="no-such", versions=versions).available


def test_an_unavailable_backend_says_why(install, capsys):
    install("elsewhere", unavailable="needs an abacus; buy one")
    with pytest.raises(
        BackendUnavailableError,
        match="backend 'elsewhere' cannot run on this machine: needs an abacus; buy one",
    ):
        load_model_by_name("any", backend="elsewhere")
    main(["backends"])
    assert "no: needs an abacus; buy one" in capsys.readouterr().out


def test_the_best_available_backend_is_chosen_and_the_choice_logged(install):
    install("good", preference=1000)
    install("worse", preference=900)
    install("better", preference=2000, unavailable="not here")
    install("broken", "raise RuntimeError")
    with structlog.testing.capture_logs() as logs:
        assert choose_backend() == "good"
    assert {"event": "backend.chosen", "backend": "good"}.items() <= logs[-1].items()
    assert logs[-1]["available"][:2] == ["good", "worse"]
    assert any(
        entry["event"] == "backend.skipped" and entry["backend"] == "broken" for entry in logs
    )


def test_backend_without_a_preference_is_never_chosen(install, monkeypatch):
    """As the mock does."""
    install("quiet", INFO.format(body="return BackendInfo('for tests', engine='numpy')"))
    assert find_backend("quiet").info().available
    monkeypatch.setattr(plugins, "backend_names", lambda: ["mock", "quiet"])
    with pytest.raises(
        BackendNotFoundError, match=r"no backend can be chosen automatically .*: mock, quiet;"
    ):
        choose_backend()


def test_module_without_a_required_hook_is_rejected(install):
    install("empty", "")
    with pytest.raises(
        PluginError,
        match=r"'empty' \(empty 1\.2\): module plugin_empty has no hook genlm_backend_info",
    ):
        find_backend("empty").info()
    install("half", INFO.format(body="return BackendInfo('half', engine='none')"))
    with pytest.raises(
        PluginError,
        match="module plugin_half has no hook genlm_load; define it and mark it with @hookimpl",
    ):
        load_model_by_name("any", backend="half")


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "refusal", "message"),
    [
        ({"tokenizer": object()}, VocabularyError, "bytes"),
        (
            {"genlm_next_token_logprob": hookimpl(lambda self: None)},
            PluginError,
            "genlm_next_token_logprob",
        ),
        ({"genlm_clear_kv_cache": hookimpl(lambda self, politely: None)}, PluginError, "politely"),
        (
            {"genlm_next_token_logprobs": None},
            PluginError,
            r"implement genlm_next_token_logprobs\(queries\) or genlm_step\(queries\)",
        ),
        (
            {"genlm_step": hookimpl(lambda self, samples: [])},
            PluginError,
            "genlm_step takes no argument queries; name it, without a default, after self",
        ),
        ({"eos_token_ids": 257}, PluginError, "eos_token_ids must be a list of .* got 257"),
        ({"eos_token_ids": ["a"]}, PluginError, r"eos_token_ids must be .* got \['a'\]"),
        ({"vocab_size": "258"}, PluginError, "vocab_size must be an integer .* got '258'"),
        ({"max_context": 0}, PluginError, "max_context must be an integer .*, or None; got 0"),
        (
            {"genlm_clear_kv_cache": lambda self: None},
            PluginError,
            "genlm_clear_kv_cache is not marked; put @hookimpl",
        ),
    ],
)
def test_an_engine_that_is_rejected_is_closed(attributes, refusal, message):
    closed = []

    @hookimpl
    def genlm_close(self):
        closed.append(self)

    refused = type("Refused", (Plain,), {"genlm_close": genlm_close, **attributes})
    with pytest.raises(refusal, match=message):
        AsyncLM(refused, backend="x")
    assert len(closed) == 1


def test_engine_without_attributes_is_closed_and_failed_closing_only_logged():
    class Bare:
        @hookimpl
        def genlm_close(self):
            raise OSError("closed already")

    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(PluginError, match="lacks tokenizer, vocab_size, max_context, device, model"),
    ):
        AsyncLM(Bare, backend="x")
    said = {"event": "engine.close_failed", "backend": "x", "exc_info": True}
    assert said.items() <= logs[-1].items()


def test_a_closed_model_lets_go_of_its_engine():
    class Weights: ...

    class Heavy(Plain):
        def __init__(self):
            self.model = Weights()

    gc.disable()  # the collector may find it, sooner or later
    try:
        lm = AsyncLM(Heavy, backend="x")
        weights = weakref.ref(lm.underlying_model)
        lm.close()
        assert weights() is None  # at once, although the model is still referenced
    finally:
        gc.enable()
    with pytest.raises(ModelClosedError, match="model of backend 'x' has been closed"):
        _ = lm.underlying_model
    assert lm.supports("genlm_next_token_logprobs")
    assert not lm.supports("genlm_sample")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("genlm_ad_lora", r"no hook 'genlm_ad_lora'; did you mean 'genlm_add_lora'\?"),
        ("lora", "mean 'genlm_read_lora' or 'genlm_add_lora'"),
        ("LoRA", "no hook 'LoRA'; there are .*genlm_step"),
    ],
)
def test_supports_knows_the_hooks(mock, name, said):
    with pytest.raises(InvalidInputError, match=said):
        mock().supports(name)


@pytest.mark.parametrize("width", [300, 258, 200])
def test_rows_have_the_vocabularys_width_and_belong_to_the_caller(width):
    class Padded(Plain):
        vocab_size = width

        @hookimpl
        def genlm_next_token_logprobs(self, queries):
            with torch.inference_mode():
                return torch.randn(len(queries), width).log_softmax(-1)

    with AsyncLM(Padded, backend="x") as lm:
        row = lm.next_token_logprobs_sync([1])
        assert row.shape == (len(lm.byte_vocab),)
        assert abs(row.logsumexp(0)) < 1e-5
        assert torch.isinf(row[200:]).all() == (width == 200)
        row.zero_()  # a tensor of inference mode does not allow this
        with pytest.raises(ValueError, match="out of range"):
            lm.next_token_logprobs_sync([width])


@pytest.mark.parametrize("change", [lambda vocab: vocab.append(b"EOS"), list.clear])
def test_a_changed_byte_vocabulary_changes_no_row(mock, change):
    lm = mock()
    change(lm.byte_vocab)
    assert lm.next_token_logprobs_sync([1]).shape == (258,)


# --- imports --------------------------------------------------------------------------------------


def test_listing_backends_imports_no_engine():
    heavy = ["torch", "transformers", "vllm", "sglang", "mlx", "mlx_lm", "peft", "numba"]
    result = run_python(f"""
        import sys
        from genlm.core.cli import main
        main(["backends"])
        print([name for name in {heavy} if name in sys.modules])
    """)
    assert result.stdout.splitlines()[-1] == "[]"
