"""`python -m bullettrain` is the command."""

from bullettrain.cli import main

main()
