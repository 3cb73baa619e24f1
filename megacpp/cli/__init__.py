"""The `megacpp` command; imports live inside each subcommand so that --help is instant."""
