"""Small sound models of every causal family, in every type of weights: verification refuses none
that an engine serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from genlm.core.errors import EngineError
from genlm.kit.scaled_copy import small_config, thresholds
from genlm.kit.verify.comparison import compare
from genlm.kit.verify.reference import Reference, Unanswered
from genlm.kit.verify.report import Report
from genlm.kit.verify.rows import row_of
from genlm.kit.verify.subject import Subject, size_of
from tests.sweep import FACTORS, Sweep, random_model, write_as_on_the_hub

#: The types of weights.
DTYPES = ("float32", "bfloat16", "float16")

#: The length of the models' thresholds, and the longest context, in tokens.
THRESHOLD, MAX_TOKENS = 20, 64

#: A function that loads a folder with weights of a type, and returns an engine.
Load = Callable[[str, str], Any]


class Loads:
    """Loads of many small models, each compared with transformers' rows. The outcomes are printed
    at the end.

    Attributes:
        load: How the engine loads one.
        dtypes: The types of weights that it knows.
    """

    load: Load
    dtypes: Sequence[str] = DTYPES

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls, pytestconfig: pytest.Config) -> Iterator[dict[tuple[str, str], str]]:
        """The outcome of each model, by its name and its type of weights."""
        found: dict[tuple[str, str], str] = {}
        yield found
        counts = Counter(f"{dtype} {what.split(':')[0]}" for (_, dtype), what in found.items())
        lines = [f"{len(found)} loads: {dict(counts)}"]
        lines += [f"{name:28}{dtype:10}{what}" for (name, dtype), what in found.items()]
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *lines, sep="\n")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedReference]:
        with shared_reference(tmp_path_factory.mktemp("none")) as reference:
            yield reference

    def compared(self, folder: Path, dtype: str, reference: SharedReference) -> Report:
        """Load a folder and compare its rows. A closed engine of mlx leaves its thread unusable, so
        each engine has a thread of its own."""
        subject = Subject(model=str(folder), engine="engine", backend="none")
        load: Load = type(self).__dict__["load"]
        with ThreadPoolExecutor(1) as engine_thread:
            return engine_thread.submit(compared, subject, load, dtype, reference).result()


class EverySoundLoad(Loads):
    """Tests that verification passes a sound model of every family.

    Attributes:
        families: Their types.
        sweep: How their models are made.
        tried: How many it served in float32 when this was written.
    """

    families: Sequence[str]
    sweep: Sweep
    tried: int

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)
            metafunc.parametrize("family", self.families)

    def test_a_family(
        self,
        family: str,
        dtype: str,
        table: dict[tuple[str, str], str],
        reference: SharedReference,
        tmp_path: Path,
    ) -> None:
        table[family, dtype] = "not built"
        for at, (model, config) in enumerate(small_models(family, self.sweep)):
            folder = tmp_path / f"{at}"
            self.sweep.save(model.to(getattr(torch, dtype)), folder)
            if family in self.sweep.made:
                write_as_on_the_hub(config, folder)
            try:
                report = self.compared(folder, dtype, reference)
            except EngineError as error:
                table[family, dtype] = f"refused: {' '.join(str(error).split()):.300}"
                continue
            except Unanswered as error:  # transformers cannot compute so small a model
                table[family, dtype] = f"no reference: {' '.join(str(error).split()):.300}"
                continue
            worst = max(report.compared, key=lambda one: one.apart / one.allowed)
            table[family, dtype] = f"served: {worst.apart:.1e} of {worst.allowed:.1e}"
            assert report.passed, report
            return

    def test_most_families_were_tried(self, table: dict[tuple[str, str], str]) -> None:
        if len({family for family, _ in table}) < len(self.families):
            pytest.skip("not every family was asked for")
        served = {
            f for (f, dtype), what in table.items() if dtype == "float32" and "served" in what
        }
        assert len(served) >= self.tried


class SharedReference(Reference):
    """transformers' rows of one model after another, by one process: to start it takes longer than
    a small model's rows."""

    def turn_to(self, folder: Path) -> None:
        """Compute the rows of another model from now on."""
        self._source = evolve(self._source, folder=str(folder), size=size_of(folder))


def shared_reference(folder: Path) -> SharedReference:
    """The process, in which no model is loaded yet."""
    return SharedReference(Subject(model=str(folder), engine="engine", backend="none"), folder)


def compared(subject: Subject, load: Load, dtype: str, reference: SharedReference) -> Report:
    """The verification report on a model.

    Raises:
        EngineError: the engine rejects the model, or has no kernels for it.
        Unanswered: transformers cannot compute its rows.
    """
    engine = load(subject.model, dtype)

    def row(ids: Sequence[int]) -> torch.Tensor:
        try:
            return row_of(engine, ids)
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    try:
        reference.turn_to(Path(subject.model))
        reference.begin(MAX_TOKENS)
        return compare(subject, reference, row, engine.max_context, dtype)
    finally:
        getattr(engine, "genlm_close", lambda: None)()


def small_models(family: str, sweep: Sweep) -> Iterator[tuple[Any, Any]]:
    """Random models of a family, and their configurations: the narrowest first."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = CONFIG_MAPPING[family](**sweep.left_open.get(family, {}))
    except Exception:  # of some families, the defaults contradict each other
        return
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    if family in sweep.made:
        small = type(config)(**sweep.made[family])
        yield random_model(kind, small), small
        return
    near = {one.path: THRESHOLD for one in thresholds(config.to_dict())}
    for factor in FACTORS:
        try:
            given = small_config(config, factor, near).to_dict()
            given |= {n: size for n, size in sweep.sizes.items() if isinstance(given.get(n), int)}
            small = type(config).from_dict(given)
            yield random_model(kind, small), small
        except Exception:  # a class may raise any exception for sizes that it does not expect
            continue
