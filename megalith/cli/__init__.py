"""The commands: each file is one, with `main(argv)` returning its exit code."""
