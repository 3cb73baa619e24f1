"""Command `megacpp`; imports are inside each subcommand, so that --help is instant."""
