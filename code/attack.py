"""attack: attack a smoothed classifier, and check its certificates. `python code/attack.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
