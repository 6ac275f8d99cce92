"""list: datasets, architectures, objectives, attacks and procedures by name. `python code/list.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
