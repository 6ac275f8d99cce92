"""The kernels of the noise: their bits in Triton's interpreter, what compilers make of them,
machines without them.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.noise import kernels_on
from support.commands import CODE, run_process

CUDA = torch.device("cuda:0")
WITHOUT_TRITON = "Triton is not installed: torch alone draws the noise"


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What ``support.interpreted_kernels`` finds, in one process for all tests."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "interpreted_kernels.py"),
    ]
    done = run_process(
        command, tmp_path_factory.mktemp("at"), TRITON_INTERPRET="1", PYTHONPATH=str(CODE)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if "unusable" in found:
        pytest.skip(found["unusable"])
    return found


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


def compiled(name: str, kind: str, arch: int):
    """A kernel compiled for an architecture, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from smoothadv.noise import kernels

    kernel, constants = getattr(kernels, name), {"BLOCK": kernels._BLOCK}
    pointers = {"out": f"*{kind}", "plan": "*i64", "thresholds": "*i64", "starts": "*i32"}
    if name == "rounded":
        constants |= {"SHIFT": 49, "STEPS": 12}
    given = {each: pointers.get(each, "i32") for each in kernel.arg_names if each not in constants}
    if triton.__version__ < "3.2":
        source = ASTSource(
            kernel,
            given,
            constants={kernel.arg_names.index(key): constants[key] for key in constants},
        )
    else:
        source = ASTSource(
            kernel, {**given, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
        )
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": False}
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gaussian", "rounded"])
def test_compiled_kernels_spill_no_registers_and_fuse_nothing(tmp_path, name, kind, arch):
    triton = pytest.importorskip("triton", reason=WITHOUT_TRITON)
    ptx = compiled(name, kind, arch).asm["ptx"]
    assert not re.findall(r"\bfma\.|\bdiv\.(full|approx)|\bsqrt\.approx", ptx), (
        "these round as they like"
    )
    assert kind == "fp32" or f"cvt.rn.{kind.replace('fp', 'f')}.f32" in ptx
    (tmp_path / "kernel.ptx").write_text(ptx)
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = ["--fmad=false", "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
    tools = sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))
    runs = [
        subprocess.run([tool, *command], cwd=tmp_path, capture_output=True, text=True)
        for tool in tools
    ]
    said = [
        run.stderr for run in runs if run.returncode == 0
    ]  # one of several assemblers may be too old
    assert said
    for text in said:
        assert "0 bytes spill stores, 0 bytes spill loads" in text
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


def test_where_the_kernels_do_not_compile_torch_draws_the_noise_and_a_warning_says_why(
    anew, monkeypatch
):
    """Here there is no GPU: trying them out fails."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    from smoothadv.noise import kernels

    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(kernels, "try_out", no_compiler)
    with pytest.warns(DoubtfulWarning, match=r"costs speed: Failed to find C compiler\.$"):
        assert kernels_on(CUDA) is None
