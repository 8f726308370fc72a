"""The benchmark: ours beside its peers, and beside what the machine can do at best."""
