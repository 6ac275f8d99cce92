"""sweep: train, certify and attack grids of models, and report on them. `python code/sweep.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
