"""Entry point of `python -m megacpp`, which is the `megacpp` command."""

from megacpp.cli.main import main

raise SystemExit(main())
