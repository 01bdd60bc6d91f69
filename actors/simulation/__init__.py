"""Deterministic simulation: whole histories of the real runtime, from a seed, on virtual time."""

from actors.simulation.simulator import (
    SimulationFailed,
    SimulationReport,
    main_simulate,
    shrink,
    simulate,
)

__all__ = ["SimulationFailed", "SimulationReport", "main_simulate", "shrink", "simulate"]
