"""``python -m xsalab`` is the command ``xsalab``, as torchrun starts it."""

from .cli import main

if __name__ == "__main__":
    main()
