"""Run the example for Ray Train on a local Ray cluster that is started for it."""

import os
import sys

import ray

import ray_train

if __name__ == "__main__":
    # Its agents may take long to start on a busy machine.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    sys.argv[1:] = ["--fail", "--pause-s", "0.1", "--out", sys.argv[1]]
    ray_train.main()
