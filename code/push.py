"""push: put a checkpoint on the Hugging Face hub, with a model card. `python code/push.py
--help`
"""

from smoothadv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(script=__file__))
