"""predict: predict with a smoothed classifier, on clean or attacked images. `python code/predict.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
