"""How it is asked: HTTP, the command line and the environment."""
