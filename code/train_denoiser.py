"""train_denoiser: train a denoiser to put before a classifier. `python code/train_denoiser.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
