"""`python -m megacpp` is the `megacpp` command."""

from megacpp.cli.main import main

raise SystemExit(main())
