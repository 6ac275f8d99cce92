"""The short training runs that the tests of the commands share."""

EPOCHS = 3
RECIPES = {
    "gaussian": ("train", "--noise 0.25"),
    "PGD": ("train_pgd", "--noise 0.25 --attack PGD --epsilon 0.5 --num-steps 1 --num-noise-vec 2 --warmup 2"),
    "DDN": ("train_pgd", "--noise 0.25 --attack DDN --epsilon 64/255 --num-steps 2 --num-noise-vec 1 --warmup 0"),
}
RECIPES = {name: (command, options.split()) for name, (command, options) in RECIPES.items()}
