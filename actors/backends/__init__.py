"""What runs as an agent, one file for each kind of program."""
