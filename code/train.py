"""train: train a classifier under Gaussian noise (the baseline). `python code/train.py --help`"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
