"""sets: conformal sets of classes that hold the label under attack, by noisy passes.
`python code/sets.py --help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
