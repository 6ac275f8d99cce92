"""train_pgd: train a classifier with SmoothAdv. `python code/train_pgd.py --help`"""

from smoothadv.commands.train_pgd import main

if __name__ == "__main__":
    raise SystemExit(main())
