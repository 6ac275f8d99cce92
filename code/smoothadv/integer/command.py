"""quantize: a network of integers, which is one function on all machines, of a trained one."""

from collections.abc import Sequence
from functools import partial

from smoothadv.cli.runner import Options, Parser, given_settings, run
from smoothadv.integer.spec import ExportSpec, QuantizeSpec
from smoothadv.models.spec import say_what_is_certified, use_threads

_EXAMPLES = """examples:
  python code/quantize.py digits models/gaussian/checkpoint.pth.tar 0.25 \\
      models/gaussian/integers.pth.tar
  python code/certify.py digits models/gaussian/integers.pth.tar 0.25 logs/integers.tsv --sound
  python code/quantize.py export models/gaussian/integers.pth.tar models/gaussian/integers.onnx
Whoever has the checkpoint of integers can repeat that log bit for bit: docs/integer.md.
"""
_WELL = 0.99  # digits have more, CIFAR-10 after a few epochs less


make_parser = partial(
    Parser,
    prog="quantize",
    kinds=[QuantizeSpec],
    epilog=_EXAMPLES,
    description="Make a network of integers of a trained one. All its sums are proven to be exact, "
    "so that every machine computes the same logits, and certificates of certify --sound can be "
    "repeated bit for bit.",
)


def _quantize(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = QuantizeSpec(**given_settings(QuantizeSpec, options), command=tuple(command))
    say_what_is_certified(spec.dataset)
    from smoothadv.integer.quantize import quantize  # imports torch

    use_threads(spec)
    network, comparison = quantize(spec)
    bound = max(getattr(layer, "largest_sum", 0.0) for layer in network.layers)
    print(
        f"{spec.outfile}: {len(network.layers)} layers of integers; no sum exceeds "
        f"{bound:,.0f}\n"
        f"{comparison.agreement:.2%} of votes are those of the float network, on "
        f"{comparison.images} training images with {comparison.draws} draws each; certified "
        "accuracy there:"
    )
    for radius, floats, integers in comparison.certified:
        print(f"  at {radius:<6.4g} float {floats:6.1%}   integers {integers:6.1%}")
    if comparison.agreement < _WELL:
        print(
            f"train --pretrained-model {spec.outfile} --finetune-quantized, an epoch or two, "
            "may mend what was lost"
        )


export_parser = partial(
    Parser,
    prog="quantize export",
    kinds=[ExportSpec],
    description="Write a network of integers as an ONNX model, whose logits are the same integers, "
    "so that what is certified is what is deployed. It takes float32 images [batch, C, H, W] in "
    "[0, 1].",
    epilog="examples:\n  python code/quantize.py export models/gaussian/integers.pth.tar "
    "integers.onnx\n",
)


def _export(parser: Parser, options: Options, command: Sequence[str]) -> None:
    from smoothadv.integer.export import OPSET, export  # imports torch

    spec = ExportSpec(**given_settings(ExportSpec, options))
    version = export(spec.checkpoint, spec.outfile, spec.overwrite)
    found = (
        f"ONNX Runtime {version} computes the probe's logits exactly"
        if version
        else "onnxruntime is not installed"
    )
    print(
        f"{spec.outfile}: ONNX, opset {OPSET}; "
        f"{found}{'' if version else ', so no logits were compared'}"
    )


main = partial(
    run,
    "quantize",
    make_parser,
    _quantize,
    subcommands={"export": partial(run, "quantize export", export_parser, _export)},
)
