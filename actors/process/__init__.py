"""Processes of jobs: a keeper for each, and what finds and ends what it held."""
