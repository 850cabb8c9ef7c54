"""What backends share: the table of emitters, and slices in torch."""

import os

# Read by OpenMP when torch loads it, which is why it stands here. Threads that spin while they wait take the cores from
# the slice that has work: on two cores shared with other processes a step took 8 to 10 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
