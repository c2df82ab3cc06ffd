"""Draw the picture of the README from the runs of notebook 00.

python tests/draw_picture.py .github/seats.png
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

from cbresearch import Request, SchedulerConfig, simulate, viz


def main() -> None:
    lengths = np.random.default_rng(7).integers(2, 20, 20, endpoint=True).tolist()
    requests = [Request(f"r{place}", 8, length) for place, length in enumerate(lengths, start=1)]
    limits = SchedulerConfig(max_num_seqs=4)
    runs = {
        "static batching": simulate(requests, "static", scheduler=limits),
        "continuous batching": simulate(requests, "fcfs", scheduler=limits),
    }
    viz.use_style()
    picture = viz.seats(runs, time="step")
    picture.savefig(sys.argv[1], dpi=110, metadata={"Software": None})
    plt.close(picture)


if __name__ == "__main__":
    main()
