"""The command line. main.py holds the options; every command is a module of its own."""
