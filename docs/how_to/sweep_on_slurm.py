"""A sweep on a SLURM cluster: every job is one more `fl-lightning sweep` on the same study.

python docs/how_to/sweep_on_slurm.py 8 --search search.yaml --out shared/sweep --storage shared/journal
"""

import sys
from shutil import which

import submitit

from fl_lightning.cli import main


def work(words: list[str]) -> None:
    """Run trials until none is left."""
    sys.argv = ["fl-lightning"]
    main(["sweep", *words])


if __name__ == "__main__":
    num_jobs, words = int(sys.argv[1]), sys.argv[2:]
    executor = submitit.AutoExecutor("runs/jobs", cluster="slurm" if which("sbatch") else "local")
    executor.update_parameters(name="sweep", timeout_min=240, cpus_per_task=2)
    with executor.batch():  # SLURM: one job array
        jobs = [executor.submit(work, words) for _ in range(num_jobs)]
    for job in jobs:
        job.result()
        print(job.stdout())
