"""``watchkeeper simulate``: one history of the real actors, decided by a seed."""

import sys

import click


@click.command()
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), required=True, help="The seed.")
@click.option("--steps", type=click.IntRange(1, 100_000), help="Stop the clients after so many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def simulate(seed: int, steps: int | None, *, as_json: bool) -> None:
    """Run one simulated history: virtual clock, faults from the seed, every promise checked.

    The same seed gives the same log, byte for byte. Exit code 0: every promise was kept; 1: one
    was broken, and the shortest command that shows it is printed.
    """
    from actors.simulation import main_simulate

    sys.exit(main_simulate(seed, steps, as_json))
