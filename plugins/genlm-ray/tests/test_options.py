"""The options of a fleet, and the errors for invalid ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import ray

from genlm.core import BackendUnavailableError, InvalidOptionError, load_model_by_name
from genlm.core.errors import BackendNotFoundError
from genlm.ray import end_fleet
from genlm.ray.options import RayOptions
from tools.tiny import write_tokenizer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "replicas must be an integer of at least 1; got 0"),
        ({"replica": 3}, "replica.*did you mean replicas"),
        ({"hf_opts": {}}, "hf_opts.*one of the inner backend, such as .*, goes in backend_opts"),
        ({"engine_opts": {}}, "engine_opts.*one of the inner backend.*goes in backend_opts"),
        ({"backend": "ray"}, "cannot be inside"),
        ({"backend": ""}, "backend must be a string, not empty; got ''"),
        ({"backend_opts": [1]}, "backend_opts must be a dict; got [1]"),
        ({"resources": {"gpus": 1}}, "resources has no gpus; it has num_cpus, num_gpus, placement"),
        ({"resources": {"num_gpus": -1}}, "resources['num_gpus'] must be a finite number"),
        (
            {"resources": {"placement": "near"}},
            "one of spread, pack, or a placement group; got 'near'",
        ),
        ({"address": "auto"}, "address='auto' joins whatever cluster it finds"),
        ({"start_timeout": 0}, "start_timeout must be a finite number of seconds above 0; got 0"),
        ({"backend_opts": {"lock": Lock()}}, "backend_opts travels .*cannot be pickled.*lock"),
    ],
)
def test_invalid_option_is_rejected_before_a_cluster_starts(
    given: dict[str, Any], said: str
) -> None:
    pattern = said if ".*" in said else re.escape(said)
    with pytest.raises(InvalidOptionError, match=pattern):
        load_model_by_name("mock", "ray", given)


@pytest.mark.parametrize("amount", [{"num_gpus": 1.5}, {"num_cpus": 1e-9}])
def test_resources_that_ray_refuses_are_named(fleet: Any, amount: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match=f"Ray rejects .*{next(iter(amount))}"):
        fleet(resources=amount)


def test_none_is_the_default() -> None:
    assert RayOptions.checked({"backend_opts": None, "resources": None}) == RayOptions()


def test_missing_inner_backend_is_reported_at_once() -> None:
    with pytest.raises(BackendNotFoundError, match=r"moc.*did you mean 'mock'"):
        load_model_by_name("mock", "ray", {"backend": "moc"})


def test_resources_that_the_cluster_lacks_are_named(fleet: Any) -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"0 of 2 .* asks for 1 CPU, 64 GPU; .*0 GPU; ask"
    ):
        fleet(resources={"num_gpus": 64}, start_timeout=0.5)


def test_folders_are_relative_to_the_program(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are not relative to where the cluster was started."""
    write_tokenizer(tmp_path / "words", "<end>")
    monkeypatch.chdir(tmp_path)
    lm = fleet("words", replicas=1)
    lm.add_new_lora("words", "a")
    with load_model_by_name("words", "mock") as mock:
        mock.add_new_lora(str(tmp_path / "words"), "a")
        expected = mock.next_token_logprobs_sync([1], lora_name="a")
    assert lm.next_token_logprobs_sync([1], lora_name="a").equal(expected)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is in no cluster, and has no Ray client."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        ("127.0.0.1:1", BackendUnavailableError, "no Ray cluster answers at .*ray start --head"),
        ("somewhere", InvalidOptionError, "must be host:port, or ray://host:port; got 'somewhere'"),
        ("ray://127.0.0.1:1", BackendUnavailableError, "needs grpcio; pip install 'ray.client.'"),
    ],
)
def test_an_address_without_a_cluster_is_a_clear_error_at_once(
    outside: None, address: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        load_model_by_name("mock", "ray", {"backend": "mock", "address": address})


def test_fleet_is_ended_in_an_existing_cluster(outside: None) -> None:
    with pytest.raises(InvalidOptionError, match="must be that of a running cluster; got None"):
        end_fleet("big")


def test_listing_the_backend_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys, genlm.ray.plugin as p; p.genlm_backend_info(); import genlm.ray; "
        "print({'ray', 'torch'} & {*sys.modules})"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert listed.stdout.strip() == "set()", listed.stderr
