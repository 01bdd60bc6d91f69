"""The event log: what happened, and the proof of it."""
