"""train: train a classifier under Gaussian noise (the baseline). `python code/train.py --help`"""

import sys

from smoothadv.commands import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
