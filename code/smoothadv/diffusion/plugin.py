"""Registers the kinds of diffusion models that may stand before a classifier."""

from smoothadv.base.registry import DIFFUSION, Addition

for _kind in ("openai", "diffusers"):
    DIFFUSION.register(_kind)(Addition("smoothadv.diffusion.one_step:load_diffusion"))
