"""predict: predict with a smoothed classifier, on clean or attacked images. `python code/predict.py --help`"""

import sys

from smoothadv.commands import main

if __name__ == "__main__":
    raise SystemExit(main(["predict", *sys.argv[1:]]))
