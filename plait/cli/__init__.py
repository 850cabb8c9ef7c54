"""The command line: one small file per command. Everything heavy is imported inside the commands."""
