"""The runtime: who does the work."""
