"""What a GPU would have to do stays below ceilings, and what is counted is what was done; no GPU is
needed.
"""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.smoothed_attack import SmoothedAttack, _Examples
from support.commands import CODE

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 15),
    reason="counts the operators of PyTorch 2.15; older versions divide an update into others",
)

# Of each case: kernels, waits of the host, MB per image. A change may add less than a tenth of the
# first and the last, and no wait. What makes a case cheaper lowers its ceiling.
CEILINGS = {
    "noise cifar_resnet110 gaussian": (1, 0, 0.0125),
    "noise cifar_resnet110 sound": (1, 0, 0.0125),
    "noise resnet50 gaussian": (1, 0, 0.61),
    "noise resnet50 sound": (1, 0, 0.61),
    "forward cifar_resnet110 bf16": (118, 0, 5.4),
    "forward cifar_resnet110 fp32": (116, 0, 10.8),
    "forward resnet50 bf16": (63, 0, 66.0),
    "forward resnet50 fp32": (61, 0, 128.6),
    "vote cifar_resnet110 bf16 gaussian, shares: 1": (128, 1, 5.4),
    "vote cifar_resnet110 bf16 gaussian, shares: 5": (128, 1, 5.4),
    "vote cifar_resnet110 bf16 gaussian, shares: 41": (128, 1, 5.4),
    "vote resnet50 bf16 gaussian, shares: 1": (73, 1, 65.4),
    "vote resnet50 bf16 sound, shares: 1": (187, 1, 164.4),
    "vote cifar_resnet110 integers sound, shares: 1": (134, 1, 2.73),
    "update cifar_resnet110 fp32 PGD T=2 m=1": (1_999, 0, 163.5),
    "update cifar_resnet110 fp32 PGD T=10 m=8": (5_621, 0, 4_022.2),
    "update resnet50 fp32 PGD T=2 m=1": (1_038, 0, 1_769.4),
    "update cifar_resnet110 fp32 PGD T=2 m=1, as a graph": (2_005, 0, 163.5),
    "update cifar_resnet20 fp32 DDN T=4 m=1": (765, 0, 43.8),
    "added by 8 processes cifar_resnet110 fp32 PGD T=2 m=1": (18, 0, 0.34),
}
LONG = ("update cifar_resnet110 fp32 PGD T=10 m=8",)


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CODE.parent / "benchmarks"))
        yield importlib.import_module("counted_cost")


def excess(counted, images: int, ceiling: tuple[int, int, float]) -> list[str]:
    """What is above a ceiling."""
    kernels, waits, moved = ceiling
    found = {
        "kernels": (sum(counted.kernels.values()), kernels * 1.1),
        "waits": (sum(counted.waits.values()), waits + 1),
        "MB per image": (sum(counted.bytes.values()) / images / 1e6, moved * 1.1),
    }
    return [
        f"{name}: {number:,} (below {limit:,})"
        for name, (number, limit) in found.items()
        if number >= limit
    ]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CEILINGS],
)
def test_cost_stays_below_its_ceiling(name, tool):
    if "integers" in name:
        pytest.importorskip(
            "triton", reason="Triton, which computes these integers, is not installed"
        )
    (case,) = [each for each in tool.standard_cases() if each.name == name]
    assert excess(case.run(), case.images, CEILINGS[name]) == []


def test_every_case_has_a_ceiling(tool):
    assert [case.name for case in tool.standard_cases()] == list(CEILINGS)


def test_update_of_resnet110_is_launched_at_once(tool):
    """Before its graph: noise, and copies of images, labels, noise and, when they change, numbers;
    after it, sums.
    """
    (case,) = [each for each in tool.standard_cases() if each.name.endswith("T=2 m=1, as a graph")]
    counted = case.run()
    (inside,) = counted.graphs
    assert inside <= 2_000 and sum(counted.kernels.values()) - inside == counted.launches - 1 == 5


@pytest.mark.parametrize(
    ("more", "excessive"),
    [
        (lambda logits: None, []),
        (lambda logits: logits.sum().item(), ["waits"]),
        (lambda logits: [logits * 2 for _ in range(54)], ["kernels"]),
        (lambda logits: logits[:, :1].expand(-1, 1_000_000).clone(), ["MB per image"]),
    ],
)
def test_what_a_change_adds_is_noticed(more, excessive, tool, monkeypatch):
    voter = tool.voter_of("cifar_resnet110", "bf16")

    def spoiled(images: torch.Tensor) -> torch.Tensor:
        logits = voter(images)
        more(logits)
        return logits

    spoiled.dtype = voter.dtype
    monkeypatch.setattr(tool, "voter_of", lambda *of: spoiled)
    counted = tool.vote("cifar_resnet110", 4096, "bf16", 1, "gaussian")
    found = excess(counted, 4096, CEILINGS["vote cifar_resnet110 bf16 gaussian, shares: 1"])
    assert [line.partition(":")[0] for line in found] == excessive


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.empty(x.shape).copy_(x),
        lambda x: x.copy_(torch.ones(x.shape)),
        lambda x: x + torch.ones(x.shape).to(x.device),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x.__setitem__((0, 0), 2.0),
        lambda x: torch.where(x > 0, x, torch.zeros(())),
        lambda x: x[torch.tensor([1])],
    ],
)
def test_each_wait_of_the_host_is_counted(wait, tool):
    x = tensor(4, 3)
    with tool.Counted() as counted:
        wait(x)
    assert sum(counted.waits.values()) == 1, counted.waits


@pytest.mark.parametrize(
    ("work", "kernels", "moved"),
    [
        (lambda x: x.T[1:].view(2, 4)[None].expand(5, 2, 4).unbind(), 0, 0),
        (lambda x: (torch.empty_like(x), x.new_empty(7), x.detach(), x.reshape(3, 4)), 0, 0),
        (lambda x: x.to("cpu", non_blocking=True), 0, 0),
        (lambda x: torch.ones(9) * 3, 0, 0),  # on the host
        (lambda x: x[:0] * 2, 0, 0),
        (lambda x: x + 2, 1, 96),
        (lambda x: x.add_(2), 1, 96),
        (lambda x: x.fill_(2), 1, 48),
        (lambda x: x + x[:1].expand(4, 3), 1, 48 + 12 + 48),
        (lambda x: x.double(), 1, 48 + 96),
        (lambda x: x.contiguous(), 0, 0),
        (lambda x: x.T.contiguous(), 1, 96),
        (lambda x: torch.conv2d(x[None, None], tensor(3, 1, 1, 1)), 1, 48 + 12 + 144),
        (
            lambda x: torch.conv2d(x[None, None], tensor(3, 1, 1, 1), tensor(3)),
            2,
            48 + 12 + 144 + 12 + 2 * 144,
        ),
        (lambda x: torch.cat([x] * 129), 2, 2 * 129 * 48),
        (lambda x: x.index_select(0, x[:2, 0].long()), 2, 8 + 16 + 48 + 16 + 24),
        (lambda x: torch._foreach_add([x] * 129, 1.0), 3, 2 * 129 * 48),
        (lambda x: torch._foreach_mul([x] * 129, [x[:1]] * 129), 129, 129 * (48 + 12 + 48)),
        (lambda x: torch._foreach_mul_([tensor(330 * 65_536)], 2.0), 2, 2 * 4 * 330 * 65_536),
    ],
)
def test_kernels_and_bytes_are_those_of_the_operators(work, kernels, moved, tool):
    """Rows of 12 bytes, 48 in all; PyTorch concatenates 128 tensors and multiplies 64 pairs of them
    at a time.
    """
    x = tensor(4, 3)
    with tool.Counted() as counted:
        work(x)
    assert (sum(counted.kernels.values()), sum(counted.bytes.values())) == (kernels, moved), (
        counted.kernels
    )


def test_peak_is_that_of_tensors_at_a_time(tool):
    before = tensor(250)
    with tool.Counted() as counted:
        one = before + 1
        two = one + 1
        del one
        view = two[:10]
        del two
        three = view.clone()
    assert counted.peak == 3 * 1000 and counted._live == 2 * 1000 + 40 and len(three) == 10


@pytest.mark.parametrize("method", ATTACKS)
def test_attack_waits_for_no_single_example(method, tool, monkeypatch):
    """A pass waits for two lists of rows and epsilon, a call for the largest label and whether all
    is finite.
    """
    monkeypatch.setattr(
        _Examples, "checked", lambda self: self
    )  # whose questions have other answers for images
    attack, model = (
        SmoothedAttack(ATTACKS[method](0.5, 4), 0.25, 4, batch=64),
        tool.voter_of("digits_resnet8", "fp32"),
    )
    for count in (2, 6):
        with tool.Counted() as counted:
            attack(model, tensor(count, 1, 8, 8), tensor(count, dtype=torch.int64))
        assert counted.waits == {"copy to the device": 3, "value read by the host": 2}
