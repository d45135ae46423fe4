"""`python -m oscar_zoo`: the same command line as `oscar-zoo`."""

from oscar_zoo.cli.main import main

main()
