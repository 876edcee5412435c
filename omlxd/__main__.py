"""``python -m omlxd`` is the command ``omlxd``."""

from omlxd.cli import main

main()
