"""Kernels of networks of integers: what they compute in Triton's interpreter, what compilers make
of them.
"""

import re
import sys
from functools import cache, partial

import pytest
import torch

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.integer.network import IntegerNetwork
from support import triton_kernels
from support.integers import house_network

CUDA = torch.device("cuda:0")
WITHOUT_TRITON = "Triton is not installed: float32 votes"


@pytest.fixture(scope="module")
def interpreted(warm, tmp_path_factory):
    """What ``support.interpreted_integers`` finds, in a process for each argument."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    folder = tmp_path_factory.mktemp("at")
    return cache(partial(triton_kernels.interpreted, warm, "interpreted_integers", folder))


def test_logits_are_those_of_the_definition_and_the_checks_of_voting_pass(interpreted):
    whole = {"digest": True, "is refused": False, "rows of NaN": [2]}
    assert interpreted("quick")["odd"] == whole


@pytest.mark.parametrize(
    ("chosen", "network", "least"),
    [
        ("quick", "shapes of odd", 6),
        ("quick", "cifar_resnet110", 14),
        ("quick", "resnet50", 6),
        pytest.param("all", "resnet50", 29, marks=pytest.mark.slow),
    ],
)
def test_each_shape_gives_the_integers_of_the_definition(chosen, network, least, interpreted):
    """Random ones and those that make the largest sums; of the small ResNet-50, shapes with up to
    2^14 weights.
    """
    found = interpreted(chosen)[network]
    assert {name: wrong for name, wrong in found.items() if wrong} == {} and len(found) >= least


def test_planted_errors_are_noticed_in_their_layer(interpreted):
    found = interpreted("quick")["faults"]
    assert found.pop("none") is None and found.pop("roundings") == [2, 1]
    assert found == dict.fromkeys(("multiplier", "border", "bias", "tap"), 2)


def operations(arch: str, side: int) -> list:
    """The distinct kernels of an architecture."""
    from smoothadv.integer import kernels as integer_kernels

    made = integer_kernels.KernelNetwork(house_network(arch, side)).operations
    kernels = [each for each in made if isinstance(each, integer_kernels._Convolution)]
    geometry = "CHANNELS", "OUT_CHANNELS", "DEPTH", "STRIDE_H"
    return list(
        {(len(each.reads), *map(each.constants.get, geometry)): each for each in kernels}.values()
    )


def compiled(operation, arch: int) -> str:
    from smoothadv.integer.kernels import convolution

    names = {torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32"}
    names[torch.float32] = "fp32"
    is_first = not operation.reads[0]
    types = {
        "x": torch.float32 if is_first else operation.read[0].dtype,
        "mean": torch.int32 if is_first else None,
        **{"weight": torch.int8, "bias": torch.int32, "multiplier": torch.float32},
        "shortcut": operation.read[1].dtype if len(operation.read) > 1 else None,
        "out": operation.made.dtype,
    }
    given = {name: f"*{names[kind]}" for name, kind in types.items() if kind is not None}
    constants = {**operation.constants, **dict.fromkeys(types.keys() - given.keys())}
    warps = constants.pop("num_warps")
    given["rows"] = "i32"
    return triton_kernels.compiled(convolution, given, constants, arch, num_warps=warps)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "side"), [("cifar_resnet110", 32), ("resnet50", 32)])
@pytest.mark.parametrize(("target", "product"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_compiled_kernels_multiply_bytes_spill_no_registers_and_fuse_nothing(
    tmp_path, arch, side, target, product
):
    pytest.importorskip("triton", "3.2", reason="older versions are compiled in another way")
    for operation in operations(arch, side):
        ptx = compiled(operation, target)
        assert re.search(rf"\b{re.escape(product)}\S+\.s32\.s8\.s8", ptx), operation.constants
        assert not re.findall(r"\bfma\.|\.ftz|\bdiv\.", ptx), "these round as they like"
        triton_kernels.assembled(ptx, tmp_path)


def test_kernels_are_for_cuda_and_a_warning_says_where_they_do_not_run():
    """Here there is no GPU: trying them out fails."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    from smoothadv.integer import kernels as integer_kernels
    from support.interpreted_integers import odd_network

    network = odd_network()
    assert integer_kernels.kernel_form(network, torch.device("cpu")) is None
    with pytest.warns(DoubtfulWarning, match="costs speed: "):
        assert network.fast_form(CUDA) is None


def test_without_triton_float32_votes(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "smoothadv.integer.kernels", raising=False)
    monkeypatch.delattr("smoothadv.integer.kernels", raising=False)
    assert IntegerNetwork.fast_form(None, CUDA) is None
