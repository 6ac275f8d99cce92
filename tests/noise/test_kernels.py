"""The kernels of the noise: their bits in Triton's interpreter, what compilers make of them,
machines without them.
"""

import re
import sys

import pytest
import torch

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.noise import kernels_on
from support import triton_kernels

CUDA = torch.device("cuda:0")
WITHOUT_TRITON = "Triton is not installed: torch alone draws the noise"


@pytest.fixture(scope="module")
def interpreted(warm, tmp_path_factory):
    """What ``support.interpreted_kernels`` finds, in one process for all tests."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    folder = tmp_path_factory.mktemp("at")
    return triton_kernels.interpreted(warm, "interpreted_kernels", folder)


def test_words_are_those_of_philox_and_a_wrong_multiplier_is_noticed(interpreted):
    assert interpreted["words"] == 0
    assert interpreted["words of a wrong multiplier"] > 8000  # few addresses have a first word of 0


@pytest.mark.parametrize("blocks", ["batches", "small blocks"])
def test_every_batch_is_that_of_the_definition_in_one_launch(interpreted, blocks):
    """All bits of rounded noise; of Gaussian noise, those of its float32 sum with the image."""
    found = interpreted[blocks]
    assert {each["case"]: each["wrong"] for each in found if each["wrong"]} == {}
    assert {each["launches"] for each in found} == {1}
    assert blocks != "batches" or sum(each["addresses"] for each in found) > 50_000


def test_gaussian_noise_is_as_accurate_as_stated(interpreted):
    by_kernel, by_torch = zip(
        *(each["errors"] for each in interpreted["batches"] if each["errors"])
    )
    assert max(by_kernel) < 4e-7 < max(by_torch), "what torch computes in float32 would be noticed"
    assert interpreted["extremes"] < 3e-9


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gaussian", "rounded"])
def test_compiled_kernels_spill_no_registers_and_fuse_nothing(tmp_path, name, kind, arch):
    pytest.importorskip("triton", "3.2", reason="older versions are compiled in another way")
    from smoothadv.noise import kernels

    kernel, constants = getattr(kernels, name), {"BLOCK": kernels._BLOCK}
    pointers = {"out": f"*{kind}", "plan": "*i64", "thresholds": "*i64", "starts": "*i32"}
    if name == "rounded":
        constants |= {"SHIFT": 49, "STEPS": 12}
    types = {each: pointers.get(each, "i32") for each in kernel.arg_names if each not in constants}
    ptx = triton_kernels.compiled(kernel, types, constants, arch)
    assert not re.findall(r"\bfma\.|\bdiv\.(full|approx)|\bsqrt\.approx", ptx), (
        "these round as they like"
    )
    assert kind == "fp32" or f"cvt.rn.{kind.replace('fp', 'f')}.f32" in ptx
    for text in triton_kernels.assembled(ptx, tmp_path):
        assert int(re.findall(r"Used (\d+) registers", text)[0]) <= 96


@pytest.fixture
def anew():
    """What is known of the devices is forgotten before and afterwards."""
    kernels_on.cache_clear()
    yield
    kernels_on.cache_clear()


def test_without_triton_torch_draws_the_noise(anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "smoothadv.noise.kernels", raising=False)
    monkeypatch.delattr("smoothadv.noise.kernels", raising=False)
    assert kernels_on(CUDA) is None


def test_where_kernels_do_not_compile_torch_draws_the_noise_with_a_warning(anew, monkeypatch):
    """Here there is no GPU: trying them out fails."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    from smoothadv.noise import kernels

    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(kernels, "try_out", no_compiler)
    with pytest.warns(DoubtfulWarning, match=r"costs speed: Failed to find C compiler\.$"):
        assert kernels_on(CUDA) is None
