"""Networks of integers are trained, rounded in each pass with the gradient of the identity, and
resumed bit by bit.
"""

import signal

import pytest
import torch
from torch.nn import functional as F

from smoothadv.checkpoints import load_classifier
from smoothadv.integer.layers import Convolution
from smoothadv.integer.network import IntegerNetwork
from smoothadv.integer.training import TrainedIntegers
from support.commands import call, refused, rows, timeless
from support.integers import grey_images, house_network
from support.trainings import after_update, read, same_state, send

DIGITS = ["digits", "digits_resnet8"]
OF_DIGITS = "digits_resnet8", 8, 16
SHORT = ["--noise", 0.25, "--device", "cpu", "--batch", 16]
SHORT += ["--steps-per-epoch", 3, "--evaluate-images", 10]


def finetune(capsys, integers, folder, *options):
    attack = ["--attack", "PGD", "--epsilon", 0.25, "--num-steps", 1, "--warmup", 1]
    options = ["--epochs", 2, "--lr", 0.01, "--pretrained-model", integers, *options]
    return call(
        capsys, "train_pgd", *DIGITS, folder, *SHORT, *attack, "--finetune-quantized", *options
    )


def test_parameters_stand_for_the_same_integers():
    made = house_network(*OF_DIGITS)
    made.set_probe()
    again = TrainedIntegers(house_network(*OF_DIGITS)).integers()
    again.set_probe()
    assert again.probe == made.probe
    (record, tensors), (same, others) = made.stored(), again.stored()
    assert record == same and tensors.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


def test_parameters_are_as_large_as_initial_weights():
    """He et al.: the variance is 2 / fan-in, here up to a factor of 2 of the deviation, as units
    are powers of 2.
    """
    for layer in TrainedIntegers(house_network(*OF_DIGITS)).layers:
        if isinstance(layer, Convolution):
            parameter = layer.parametrizations.weight.original.detach()
            assert 0.7 < parameter.square().mean().sqrt() / (2 / parameter[0].numel()) ** 0.5 < 1.42


def test_gradient_passes_through_rounding():
    """Of the last weights, against the formula for a linear layer: m (softmax - one-hot) x, x the
    integers it read.
    """
    trained, images, labels = (
        TrainedIntegers(house_network(*OF_DIGITS)),
        grey_images(16, (1, 8, 8)),
        torch.arange(16) % 10,
    )
    last, was_read = trained.layers[-1], []
    last.register_forward_pre_hook(
        lambda layer, inputs: was_read.append(inputs[0].detach().flatten(1))
    )
    logits = trained(images)
    F.cross_entropy(logits, labels).backward()
    errors = logits.detach().softmax(1) - F.one_hot(labels, 10)
    expected = last.multiplier.view(-1, 1) * errors.T @ was_read[0] / 16
    found = (
        last.parametrizations.weight.original.grad.flatten(1) * last.parametrizations.weight[0].unit
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)
    for layer in trained.layers:
        if isinstance(layer, Convolution):
            assert layer.parametrizations.weight.original.grad.abs().max() > 0, (
                "a plain rounding would give 0"
            )


def test_no_weight_exceeds_the_largest_however_far_a_parameter_drifts():
    layer = TrainedIntegers(house_network(*OF_DIGITS)).layers[0]
    parameter, (rounding,) = layer.parametrizations.weight.original, layer.parametrizations.weight
    for drift in (2.0**20, 2.0**25, 2.0**40):
        parameter.data.fill_(drift * rounding.unit)
        assert (layer.weight == rounding.largest).all()
        (gradient,) = torch.autograd.grad(layer.weight.sum(), parameter)
        torch.testing.assert_close(gradient, torch.full_like(gradient, 1 / rounding.unit))


def test_checkpoint_is_one_of_integers_and_a_stopped_run_goes_on(integers, tmp_path, capsys):
    """SmoothAdv, whose attacks go through the rounded network; stopped in the second epoch by
    SIGTERM.
    """
    assert finetune(capsys, integers, tmp_path / "whole").code == 0
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 5, lambda: send(signal.SIGTERM))
        assert finetune(capsys, integers, tmp_path / "run").code == 143
    assert finetune(capsys, integers, tmp_path / "run", "--resume").code == 0
    assert same_state(tmp_path / "run", tmp_path / "whole")
    assert timeless(tmp_path / "run/log.txt") == timeless(tmp_path / "whole/log.txt")
    assert type(load_classifier(tmp_path / "run/checkpoint.pth.tar", "digits")) is IntegerNetwork
    before = torch.load(integers, weights_only=True)["state_dict"]
    after = read(tmp_path / "run")["state_dict"]
    assert all(
        after[name].equal(value) for name, value in before.items() if name.endswith("multiplier")
    )
    assert any(
        not after[name].equal(value) for name, value in before.items() if name.endswith("weight")
    )
    log = tmp_path / "log.tsv"
    sound = ["--sound", "--N0", 10, "--N", 100, "--max", 2, "--device", "cpu"]
    assert (
        call(
            capsys, "certify", "digits", tmp_path / "run/checkpoint.pth.tar", 0.25, log, *sound
        ).code
        == 0
    )
    assert call(capsys, "certify", "verify", log).code == 0
    assert len(rows(log)) == 2


def test_what_does_not_fit_is_refused(checkpoint, integers, tmp_path, capsys):
    folder = tmp_path / "run"
    assert refused(
        finetune(capsys, checkpoint, folder),
        checkpoint,
        "holds a digits_resnet8",
        "integer:digits_resnet8",
    )
    for wrong in (["--precision", "bf16"], ["--pretrained-model", None]):
        options = ["--finetune-quantized", "--pretrained-model", integers, *wrong]
        options = options[:1] if None in wrong else options
        outcome = call(capsys, "train", *DIGITS, folder, *SHORT, "--epochs", 1, *options)
        assert refused(outcome, "--finetune-quantized needs", code=2)
    outcome = call(
        capsys, "train", *DIGITS, folder, *SHORT, "--epochs", 1, "--pretrained-model", integers
    )
    assert refused(outcome, integers, "--finetune-quantized")
    assert not folder.exists()
